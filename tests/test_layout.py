"""The tree is the architecture: these tests hold the parts that import-linter cannot see."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from workflows.profile import load_profile, profile_names
from workflows.stages import STAGES

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("components/**/*.py"), *ROOT.glob("kernels/**/*.py")])
WORKFLOWS = sorted([ROOT / "pipeline.py", *ROOT.glob("workflows/**/*.py")])


def imports_of(tree: ast.AST) -> set[str]:
    """Top-level package names that a syntax tree imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_kernels_is_no_package_because_transformers_imports_that_name():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "from transformers import LlamaForCausalLM"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_its_four_files(stage):
    folder = ROOT / "components" / "bebop" / stage
    for name in ("component.py", "stage.py", "__main__.py", "README.md"):
        assert (folder / name).is_file(), f"{stage} lacks {name}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_component_is_a_thin_contract(stage):
    source = (ROOT / "components" / "bebop" / stage / "component.py").read_text()
    assert len(source.splitlines()) <= 40
    module_level = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert imports_of(ast.Module(body=module_level, type_ignores=[])) == {"kfp"}


@pytest.mark.parametrize("path", [*SOURCES, *WORKFLOWS], ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_stay_short(path):
    assert len(path.read_text().splitlines()) <= 350, "split it by decision"


def test_triton_is_imported_only_by_kernels():
    importers = {p for p in SOURCES if "triton" in imports_of(ast.parse(p.read_text()))}
    allowed = ("fused", "linear")
    strays = [p for p in importers if not p.stem.startswith(allowed)]
    assert not [p for p in strays if "benchmarks" not in p.parts]


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_parses(name):
    assert set(load_profile(name).configs) == set(STAGES)


def test_the_stages_help_needs_no_torch():
    code = "import sys; import bebop.mtp_sft.stage as s; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
