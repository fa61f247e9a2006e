"""Loading a model: what cannot be trained in packed rows, or through the head alone, is refused; and dropout is off."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.random_samples import VOCABULARY, random_samples, tiny_learner, tiny_model
from train.config import GrpoConfig, LoraSettings, OptimizerConfig
from train.lora import load_trained
from train.model import check_scoring, load_model, load_tokenizer, score

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": 3, "pad_token_id": 1,
    # Larger than usual, so that what a token sees changes its logprobs visibly.
    "initializer_range": 0.2,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}

TRAINABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "gemma3_text": {"head_dim": 16},
    "gpt2": GPT2,  # places of its own for each position; so has the next (C36)
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "mistral": {"sliding_window": 24},
    "smollm3": {},
    "phi3": {},
    "olmo2": {},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "qk_nope_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, **EXPERTS,
    },
}  # fmt: skip
SEE_EACH_OTHER: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 96,
        "mamba_n_groups": 1, **MAMBA,
    },
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA, "mamba_n_heads": 4},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "nemotron_h": {
        "layer_types": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 1,
    },
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 64},
}  # fmt: skip
MORE_THAN_A_HEAD: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
}
OTHER_ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"head_dim": 16}, "its attention has softcap"),
    "falcon": ({}, "the attention of FalconForCausalLM cannot be replaced"),
    "stablelm": ({}, "the row's pieces do not reach StableLmAttention"),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def make(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | options), attn_implementation="sdpa")


def load(folder: Path, kind: str, dtype: str, **options: Any) -> Any:
    make(kind, **options).save_pretrained(folder)
    return load_model(str(folder), dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", TRAINABLE)
def test_models_that_only_attend_are_loaded(tmp_path: Path, kind: str, dtype: str) -> None:
    assert load(tmp_path, kind, dtype, **TRAINABLE[kind]).training


@pytest.mark.parametrize("kind", SEE_EACH_OTHER)
def test_models_in_which_packed_samples_see_each_other_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^model {tmp_path}: samples packed into one row see each other in \w+ "):
        load(tmp_path, kind, "float32", **SEE_EACH_OTHER[kind])


@pytest.mark.parametrize("kind", MORE_THAN_A_HEAD)
def test_models_whose_logits_are_more_than_a_matrix_product_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^model {tmp_path}: the logits of \w+ are more than its head's matrix "):
        load(tmp_path, kind, "float32", **MORE_THAN_A_HEAD[kind])


@pytest.mark.parametrize("kind", OTHER_ATTENTION)
def test_models_with_an_attention_of_another_kind_are_refused(kind: str) -> None:
    options, says = OTHER_ATTENTION[kind]
    model = make(kind, **options)
    with pytest.raises(ValueError, match=rf"^model m: {says}.*, so it cannot be trained here"):
        check_scoring(model, name="m")


def test_a_check_leaves_the_attention_as_it_was() -> None:
    model = make("llama")
    check_scoring(model, name="m")
    assert model(input_ids=torch.tensor([[9, 8]]), attention_mask=torch.tensor([[0, 1]])).logits.isfinite().all()


@pytest.mark.parametrize(("kind", "options"), [("lfm2", SEE_EACH_OTHER["lfm2"]), ("cohere", {"logit_scale": 0.0625})])
def test_rounding_hides_nothing(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be trained here"):
        load(tmp_path, kind, "bfloat16", **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", GPT2),  # 0.1 by default, in layers of their own
        ("llama", {"attention_dropout": 0.5}),  # a number in the attention layers
        ("opt", {"dropout": 0.5, "ffn_dim": 96, "word_embed_proj_dim": 64}),  # a number in the layers
    ],
)
def test_the_first_update_has_a_ratio_of_one(kind: str, options: dict[str, Any]) -> None:
    """What was sampled from the model as it is is what the trainer's first forward pass says."""
    learner = tiny_learner(make(kind, **options).train(), GrpoConfig(max_micro_batch_tokens=512), OptimizerConfig())
    policy = make(kind, **options).eval()
    sampled = [
        replace(sample, sampled_logprobs=(0.0, *score(policy, sample.token_ids)))
        for sample in random_samples(3, advantages=[1.0, -1.0, 0.5])
    ]
    metrics = learner.update(learner.pack(sampled))
    assert metrics["logprob_gap/max"] < 1e-4
    assert metrics["clip_ratio"] == 0.0


def test_small_steps_reach_weights_that_are_trained_in_bfloat16(tmp_path: Path) -> None:
    """A step of 1e-6 is less than half the distance between two bfloat16 numbers for nearly every weight."""
    tiny_model().save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    model = load_trained(str(tmp_path), dtype="bfloat16", lora=LoraSettings(), device=cpu, seed=0)
    learner = tiny_learner(
        model, GrpoConfig(max_micro_batch_tokens=512, dtype="bfloat16"), OptimizerConfig(learning_rate=1e-6)
    )
    ids = [9, 30, 41, 12, 77, 25, 60]
    rough, exact = torch.tensor(learner.score(ids)), torch.tensor(score(model, ids))
    assert 0 < (rough - exact).abs().max() < 0.3, "computed in bfloat16, from the same weights"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learner.update(learner.pack(random_samples(4, advantages=[1.0, -1.0, 1.0, -1.0])))
    changed = sum((parameter != before[name]).sum().item() for name, parameter in model.named_parameters())
    assert changed > 0.9 * sum(parameter.numel() for parameter in model.parameters())


def test_the_schedule_ends_with_the_run_whatever_the_steps_had_to_train_on() -> None:
    learner = tiny_learner(
        tiny_model(),
        GrpoConfig(max_micro_batch_tokens=512, max_steps=4, num_mini_batches=2),
        OptimizerConfig(learning_rate=1.0, lr_scheduler_type="linear"),
    )
    batches = learner.pack(random_samples(2, advantages=[0.0, 0.0]))
    rates = []
    for updates in (0, 2, 1, 2):
        rates.append([learner.update(batches)["learning_rate"] for _ in range(updates)])
        learner.end_step()
    assert rates == [[], [0.75, 0.75], [0.5], [0.25, 0.25]]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "there is no tokenizer.json in it$"), ("{", "Expecting property name")]
)
def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path, content: str | None, said: str) -> None:
    shutil.copy("models/embedded/config.json", tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"no tokenizer can be loaded: {said}"):
        load_tokenizer(str(tmp_path))
