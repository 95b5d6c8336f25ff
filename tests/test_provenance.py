"""Artifacts are whole or absent, and their hashes say what is in them."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bebop.errors import ArtifactError
from bebop.provenance import (
    atomic_dir,
    atomic_file,
    git_sha,
    hash_path,
    link_or_copy_tree,
    package_versions,
    read_manifest,
    write_json,
    write_provenance,
)


def visible(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def hidden(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def make_tree(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# --- atomic_dir


def test_folder_appears_only_when_the_body_has_ended(tmp_path):
    target = tmp_path / "deep" / "model"
    with atomic_dir(target) as folder:
        make_tree(folder, a="1", sub__b="2")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "sub" / "b").read_text() == "2"
    assert hidden(target.parent) == []
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_error_in_the_body_leaves_nothing(tmp_path):
    def write_half():
        with atomic_dir(tmp_path / "model") as folder:
            (folder / "a").write_text("1")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_whatever_was_there_is_replaced_whole(tmp_path, kind):
    target, elsewhere = tmp_path / "model", make_tree(tmp_path / "other", keep="me")
    if kind == "folder":
        make_tree(target, old="1")
    elif kind == "file":
        target.write_text("old")
    else:
        target.symlink_to(elsewhere)
    with atomic_dir(target) as folder:
        (folder / "new").write_text("2")
    assert visible(target) == ["new"]
    assert not target.is_symlink()
    assert (elsewhere / "keep").read_text() == "me"
    assert hidden(tmp_path) == []


def test_error_keeps_the_old_folder(tmp_path):
    target = make_tree(tmp_path / "model", old="1")

    def write_half():
        with atomic_dir(target) as folder:
            (folder / "new").write_text("2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert visible(target) == ["old"]


KILLED = """
import pathlib, sys, time
from bebop.provenance import atomic_dir
with atomic_dir(pathlib.Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("before", [True, False])
def test_kill_leaves_only_a_hidden_folder(tmp_path, before):
    target = tmp_path / "model"
    if before:
        make_tree(target, old="1")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert visible(tmp_path) == (["model"] if before else [])
    assert [name.startswith(".model.") for name in hidden(tmp_path)] == [True]
    if before:
        assert visible(target) == ["old"]
    with atomic_dir(target) as folder:
        (folder / "whole").write_text("y")
    assert visible(target) == ["whole"]


# --- atomic_file, write_json


def test_file_is_replaced_only_on_success(tmp_path):
    target = tmp_path / "deep" / "a.txt"
    with atomic_file(target) as temporary:
        temporary.write_text("one")
        assert not target.exists()
    assert target.read_text() == "one"

    def write_half():
        with atomic_file(target) as temporary:
            temporary.write_text("two")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_text() == "one"
    assert os.listdir(target.parent) == ["a.txt"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_json_has_not(tmp_path, value):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": value})
    assert list(tmp_path.iterdir()) == []


# --- hash_path


def test_hash_depends_on_contents_and_names_only(tmp_path):
    one = make_tree(tmp_path / "one", a="1", sub__b="2")
    two = make_tree(tmp_path / "two", sub__b="2", a="1")
    os.utime(two / "a", (1, 1))
    assert hash_path(one) == hash_path(two)
    assert hash_path(one).startswith("sha256:")


def test_hash_sees_changes_renames_moves_and_additions(tmp_path):
    base = make_tree(tmp_path / "base", a="1", b="2")
    variants = {
        "changed": {"a": "1", "b": "3"},
        "renamed": {"a": "1", "c": "2"},
        "swapped": {"a": "2", "b": "1"},
        "moved": {"a": "1", "sub__b": "2"},
        "added": {"a": "1", "b": "2", "c": ""},
        "joined": {"a": "12"},
    }
    hashes = {hash_path(make_tree(tmp_path / n, **files)) for n, files in variants.items()}
    assert len(hashes | {hash_path(base)}) == len(variants) + 1


def test_hash_leaves_provenance_out_at_every_level(tmp_path):
    folder = make_tree(tmp_path / "one", a="1")
    before = hash_path(folder)
    make_tree(folder, **{"provenance.json": "{}", "sub__provenance.json": "{}"})
    assert hash_path(folder) == before


def test_hash_of_a_file_does_not_depend_on_its_name(tmp_path):
    make_tree(tmp_path, a="same", b="same", c="other")
    assert hash_path(tmp_path / "a") == hash_path(tmp_path / "b") != hash_path(tmp_path / "c")


def test_hash_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ArtifactError, match=r"missing \(.*gone\)"):
        hash_path(tmp_path / "gone")


# --- provenance and manifests


def test_provenance_records_code_config_and_inputs(tmp_path):
    source = make_tree(tmp_path / "input", a="1")
    (tmp_path / "out").mkdir()
    start = time.gmtime()
    write_provenance(tmp_path / "out", "mtp_sft", {"seed": 3, "steps": 2}, {"dataset": source})
    record = read_manifest(tmp_path / "out", "provenance.json")
    assert record["stage"] == "mtp_sft"
    assert record["config"] == {"seed": 3, "steps": 2}
    assert record["seed"] == 3
    assert record["inputs"] == {"dataset": {"hash": hash_path(source)}}
    assert record["packages"] == package_versions()
    assert {"torch", "kfp", "mlflow"} <= set(record["packages"])
    written = time.strptime(record["written_at"], "%Y-%m-%dT%H:%M:%SZ")
    assert time.mktime(written) >= time.mktime(start)


def test_git_sha_is_the_image_s_when_it_has_one(monkeypatch):
    monkeypatch.setenv("BEBOP_GIT_SHA", "abc123")
    assert git_sha() == "abc123"


def test_git_sha_is_the_checkout_s(monkeypatch):
    monkeypatch.delenv("BEBOP_GIT_SHA", raising=False)
    sha = git_sha().removesuffix("-dirty")
    assert sha == "unknown" or (len(sha) == 40 and int(sha, 16) >= 0)


def test_manifest_of_the_known_version_is_read(tmp_path):
    write_json(tmp_path / "m.json", {"version": 1, "x": 2})
    assert read_manifest(tmp_path, "m.json")["x"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 2}', "version 2 is not known; this code reads version 1"),
        ('{"x": 1}', "version None is not known"),
        ("[1]", "version 'list' is not known"),
        ('{"version": 1', "damaged JSON"),
        ("\xff", "damaged JSON"),
    ],
)
def test_other_manifests_are_refused_with_their_place(tmp_path, text, message):
    (tmp_path / "m.json").write_text(text, encoding="latin-1")
    with pytest.raises(ArtifactError, match=message) as caught:
        read_manifest(tmp_path, "m.json")
    assert str(tmp_path / "m.json") in str(caught.value)


def test_missing_manifest_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"no m\.json"):
        read_manifest(tmp_path, "m.json")


# --- link_or_copy_tree


def test_linked_copy_has_the_same_hash_and_no_second_data(tmp_path):
    source = make_tree(tmp_path / "one", a="1", sub__b="2")
    link_or_copy_tree(source, tmp_path / "two")
    assert hash_path(tmp_path / "two") == hash_path(source)
    assert (tmp_path / "two" / "a").samefile(source / "a")


def test_copy_works_across_file_systems(tmp_path):
    source = make_tree(tmp_path / "one", a="1")
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == source.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        link_or_copy_tree(source, Path(other) / "two")
        assert hash_path(Path(other) / "two") == hash_path(source)


def test_json_ends_with_a_line_end_and_is_readable(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1, 2.5, "α"]})
    text = (tmp_path / "a.json").read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == {"b": [1, 2.5, "α"]}


def test_artifacts_are_readable_by_the_next_stage_s_user(tmp_path):
    with atomic_dir(tmp_path / "model") as temporary:
        (temporary / "secret.bin").touch(mode=0o600)
    assert (tmp_path / "model" / "secret.bin").stat().st_mode & 0o777 == 0o644
