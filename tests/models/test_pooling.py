"""How a model's files say that a text becomes a vector."""

import json

import pytest

from cloister.models import read_pooling
from cloister.types.errors import ModelError
from tests.gguf_factory import make_gguf

MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


def write(path, *, modules=MODULES, pooling=None):
    """Writes what sentence-transformers writes beside a model."""
    steps = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{name}"}
        for i, (folder, name) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(steps))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_a_model_that_says_nothing_takes_the_mean_and_normalises(tmp_path):
    found = read_pooling(tmp_path)
    assert (found.kind, found.normalize, found.dimensions) == ("mean", True, None)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_files_of_sentence_transformers_count(tmp_path, config, kind):
    assert read_pooling(write(tmp_path, pooling=config)).kind == kind


def test_without_a_step_that_normalises_vectors_keep_their_length(tmp_path):
    found = read_pooling(write(tmp_path, modules=MODULES[:2], pooling={"pooling_mode_lasttoken": True}))
    assert (found.kind, found.normalize) == ("last", False)


@pytest.mark.parametrize("mode", ["pooling_mode_cls_token", "pooling_mode_weightedmean_tokens"])
def test_another_way_to_pool_is_refused_unless_the_setting_says_what_to_do(tmp_path, mode):
    write(tmp_path, pooling={mode: True})
    with pytest.raises(ModelError, match="set pooling to last or mean"):
        read_pooling(tmp_path)
    assert read_pooling(tmp_path, "last").kind == "last"


def test_a_step_that_is_not_computed_is_refused_by_name(tmp_path):
    write(tmp_path, modules=[*MODULES, ("3_Dense", "Dense")], pooling={"pooling_mode_mean_tokens": True})
    with pytest.raises(ModelError, match="Dense"):
        read_pooling(tmp_path)
    assert read_pooling(tmp_path, "mean").kind == "mean"


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(("number", "kind"), [(0, "mean"), (1, "mean"), (3, "last")])
def test_gguf_metadata_counts(tmp_path, number, kind):
    file = make_gguf(tmp_path / "m", "llama", "F32", edit=lambda w: w.add_uint32("llama.pooling_type", number))
    assert read_pooling(file).kind == kind


def test_a_way_to_pool_in_gguf_metadata_that_is_not_computed_is_refused(tmp_path):
    file = make_gguf(tmp_path / "m", "llama", "F32", edit=lambda w: w.add_uint32("llama.pooling_type", 4))
    with pytest.raises(ModelError, match="rank"):
        read_pooling(file)
