"""The train benchmark: its shape, its arithmetic, and that contenders do the same work. No test asserts a speed."""

from __future__ import annotations

from typing import Any

from data.prefix_tree import grow_tree
from scripts.bench_train import CONTENDERS, _summary
from scripts.bench_train_run import run
from scripts.bench_train_shape import make_group


def test_the_shape_is_an_agents() -> None:
    samples = make_group(1.0, seed=0, vocabulary=700)
    assert len(samples) == 8
    assert {sample.token_ids[:300] for sample in samples} == {samples[0].token_ids[:300]}
    trained = [sum(sample.loss_mask) for sample in samples]
    assert 0.8 * 260 < sum(trained) / 8 < 1.2 * 260
    assert 0.8 * 2960 < sum(len(sample) for sample in samples) / 8 < 1.2 * 2960
    assert len(grow_tree(samples).token_ids) == sum(len(sample) for sample in samples) - 7 * 300
    unshared = make_group(1.0, seed=0, vocabulary=700, shared=False)
    assert [len(sample) for sample in unshared] == [len(sample) for sample in samples]
    assert len(grow_tree(unshared).pieces) == 8


def test_ratios_by_hand() -> None:
    def row(seconds: float, mib: float) -> dict[str, Any]:
        return {
            "seconds": [seconds], "cpu_seconds": [2 * seconds], "peak_bytes": int(mib * 2**20),
            "largest_micro_batch_tokens": 9,
        }  # fmt: skip

    figures = {"ours": (1.2, 4), "ours_unshared": (1.5, 5), "bare": (1.0, 4), "trl": (3.0, 7), "trl_compact": (2.4, 8)}
    assert set(figures) == set(CONTENDERS)
    summary = _summary({name: [row(*values)] for name, values in figures.items()})
    assert summary["ratios"]["time_over_bare"] == summary["ratios"]["cpu_time_over_bare"] == 1.2
    assert summary["ratios"]["time_over_trl"] == 0.5, "the faster of TRL's"
    assert summary["ratios"]["memory_over_trl"] == 0.571, "the smaller of TRL's"
    assert list(summary["targets_met"].values()) == [True, True, False]


def test_a_contender_is_measured() -> None:
    options = {
        "contender": "ours", "model": "embedded", "scale": 0.02, "seed": 0, "steps": 1, "dtype": "float32",
        "micro_batch": 4, "gradient_checkpointing": False,
    }  # fmt: skip
    found = run(options)
    assert len(found["seconds"]) == len(found["cpu_seconds"]) == 1
    assert found["largest_micro_batch_tokens"] <= 4 * max(
        len(sample) for sample in make_group(0.02, seed=0, vocabulary=700)
    )
