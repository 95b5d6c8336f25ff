import json

import pyarrow
import pyarrow.parquet
import pytest
from tests.small_dataset import manifest, write_prompts

from bebop.dataset import read_prompts, read_rows, read_sampling
from bebop.errors import ArtifactError, InputError

VOCABULARY = 64


def eval_file(dataset):
    return dataset / "prompts" / "eval.parquet"


def test_prompts_keep_the_file_s_order_and_can_be_cut(tmp_path):
    write_prompts(eval_file(tmp_path), [[1, 2], [3], [4, 5]])
    prompts = read_prompts(tmp_path, "eval", VOCABULARY, 2)
    assert [(p.prompt_id, p.tokens, p.entry) for p in prompts] == [
        ("p0", (1, 2), {}),
        ("p1", (3,), {}),
    ]
    assert len(read_prompts(tmp_path, "eval", VOCABULARY)) == 3


def test_missing_prompts_are_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"eval\.parquet"):
        read_prompts(tmp_path, "eval", VOCABULARY)


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    eval_file(tmp_path).parent.mkdir()
    eval_file(tmp_path).write_text("not parquet")
    with pytest.raises(ArtifactError, match="not a parquet file"):
        read_prompts(tmp_path, "eval", VOCABULARY)


def test_a_missing_column_is_named(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [[1]]}), file)
    with pytest.raises(ArtifactError, match="mask"):
        read_rows(file, ("tokens", "mask"))


def test_an_empty_dataset_is_refused(tmp_path):
    write_prompts(eval_file(tmp_path), [])
    with pytest.raises(InputError, match="there is no prompt"):
        read_prompts(tmp_path, "eval", VOCABULARY)


@pytest.mark.parametrize("prompt", [[], [3, 64], [-1]])
def test_a_prompt_of_another_model_is_refused(tmp_path, prompt):
    write_prompts(eval_file(tmp_path), [[1, 2], prompt])
    with pytest.raises(InputError, match="prompt p1 is empty or has a token outside"):
        read_prompts(tmp_path, "eval", VOCABULARY)
    assert read_prompts(tmp_path, "eval", VOCABULARY, 1)[0].tokens == (1, 2)


def test_an_entry_that_is_not_json_is_refused(tmp_path):
    file = eval_file(tmp_path)
    write_prompts(file, [[1, 2]])
    table = pyarrow.parquet.read_table(file)
    broken = table.set_column(table.column_names.index("entry"), "entry", [["{"]])
    pyarrow.parquet.write_table(broken, file)
    with pytest.raises(ArtifactError, match="entry of prompt p0 is not JSON"):
        read_prompts(tmp_path, "eval", VOCABULARY)


def test_sampling_is_the_recorded_one_with_the_given_changes(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(temperature=0.7, top_k=5)))
    own = read_sampling(tmp_path, top_p=None)
    assert (own.temperature, own.top_k, own.top_p, own.max_tokens) == (0.7, 5, 1.0, 12)
    assert own.stop_token_ids == (2,)
    changed = read_sampling(tmp_path, temperature=0.0, stop_token_ids=())
    assert (changed.temperature, changed.stop_token_ids) == (0.0, ())


def test_a_manifest_without_sampling_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(ArtifactError, match="how rollouts are sampled"):
        read_sampling(tmp_path)
