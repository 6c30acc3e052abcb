"""Configurations of earlier versions name classes by their old paths."""

import hydra
import pytest

from common.moved_targets import MOVED, with_current_targets


@pytest.mark.parametrize("target", MOVED.values())
def test_what_has_moved_is_where_the_table_says(target):
    assert hydra.utils.get_object(target).__name__ == target.rpartition(".")[2]


def test_nothing_moves_to_where_it_is():
    assert not MOVED.keys() & set(MOVED.values())


def test_targets_are_renamed_at_any_depth_and_nothing_else_is():
    before = {"data": {"_target_": "data_pipeline.datamodule.TextData", "note": "lit_modules.pretrain.run"}}
    after = {"data": {"_target_": "data_pipeline.tokens.datamodule.TextData", "note": "lit_modules.pretrain.run"}}
    others = {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95]}
    assert with_current_targets({"stages": [before, others]}) == {"stages": [after, others]}
