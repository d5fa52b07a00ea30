"""pytest tests/test_hf_target.py: targets through transformers, against the same models run plainly.

T packed tokens, K tapped layers, H hidden, V vocabulary.
"""

import itertools
import os

import pytest
import torch
from test_target import IDS, LENGTHS, SIZES, TAIL, packed_row, randomise

import hf_target
import model

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
CLOSE = dict(rtol=1e-4, atol=1e-4)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=24, mamba_d_state=8, mamba_n_groups=1)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
)
CASES = {
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": ("Qwen3Moe", dict(**MOE, head_dim=16)),
    "gpt-oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=4)),
    "qwen3-next": ("Qwen3Next", dict(**MOE, **DELTA, shared_expert_intermediate_size=24, head_dim=16)),
    "bamba": ("Bamba", dict(**MAMBA, attn_layer_indices=[1])),
    "lfm2": ("Lfm2", dict(full_attn_idxs=[1, 3])),
    "zamba2": (
        "Zamba2",
        dict(
            mamba_d_state=8, mamba_headdim=24, mamba_ngroups=1, n_mamba_heads=4, num_mem_blocks=1,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], use_mem_rope=True, adapter_rank=4,
        ),
    ),
    "falcon-h1": (
        "FalconH1",
        MAMBA | dict(mamba_d_head=12, mamba_d_ssm=48, lm_head_multiplier=0.3, embedding_multiplier=2.0),
    ),
    "jamba": (
        "Jamba",
        dict(num_experts=2, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1),
    ),
    "gemma2": ("Gemma2", dict(head_dim=16, sliding_window=4)),
    "gemma3": ("Gemma3Text", dict(head_dim=16, sliding_window=4, final_logit_softcapping=20.0)),
    "gemma4": (
        "Gemma4Text",
        dict(
            head_dim=16, global_head_dim=16, sliding_window=4, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=83,
        ),
    ),
    "phi3": ("Phi3", dict(pad_token_id=0, sliding_window=5)),
    "gpt-neox": ("GPTNeoX", {}),
    "granite": ("Granite", dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.2)),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        dict(
            **MAMBA, layer_types=["mamba", "attention", "mamba", "attention"], shared_intermediate_size=32,
            num_local_experts=4, embedding_multiplier=3.0, logits_scaling=2.0,
        ),
    ),
    "cohere": ("Cohere", dict(logit_scale=0.2)),
    "mamba2": ("Mamba2", dict(num_heads=4, head_dim=24, state_size=8, n_groups=1)),
    "deepseek": (
        "DeepseekV3",
        dict(
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, n_group=1, topk_group=1,
            num_key_value_heads=4,
        ),
    ),
    "llama4": ("Llama4Text", dict(num_local_experts=2, head_dim=16, intermediate_size_mlp=40)),
    "bloom": ("Bloom", dict(n_layer=4, n_head=4)),
}  # fmt: skip


def make(name: str, changes: dict):
    """The plain model of a small random config."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(hf)
    return hf


@torch.no_grad()
def plain_states(hf, tokens_T: torch.Tensor) -> list[torch.Tensor]:
    """Of one document alone: what the first layer gets, what each layer returns but the last, what the head
    gets. [T, H] each.
    """
    states = hf(tokens_T[None], output_hidden_states=True, use_cache=False).hidden_states
    if hf.config.model_type == "mamba2":  # which leaves out the first
        states = (hf.get_input_embeddings()(tokens_T[None]), *states[:-2], states[-1])
    return [x[0] for x in states]


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    """(the plain model, the folder it was saved to)."""
    hf = make(*CASES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder)
    return hf, folder


@torch.no_grad()
def test_packed_features_equal_the_plain_models_one_document_at_a_time(reference):
    hf, folder = reference
    target = hf_target.Target.load(folder, layers=max(IDS) + 1, head=False)
    tokens, positions, bounds = packed_row(target.c.vocab)
    features = target.features(tokens, positions, bounds, max(LENGTHS), IDS)
    for start, end in itertools.pairwise([0, *itertools.accumulate(LENGTHS)]):
        states = plain_states(hf, tokens[start:end])
        alone = torch.cat([states[i + 1] for i in IDS], -1)
        torch.testing.assert_close(features[start:end], alone, **CLOSE)
    assert not features[sum(LENGTHS) :].any() and TAIL


@torch.no_grad()
def test_embedding_and_head_are_what_the_plain_model_computes(reference):
    hf, folder = reference
    c = hf_target.TargetConfig.from_folder(folder)
    embedding, head = hf_target.load_embedding_and_head(folder, "cpu", torch.float32)
    tokens = torch.arange(c.vocab)
    states = plain_states(hf, tokens)
    torch.testing.assert_close(embedding, states[0], **CLOSE)
    logits = states[-1] @ head.T
    if c.softcap:
        logits = c.softcap * torch.tanh(logits / c.softcap)
    torch.testing.assert_close(logits, hf(tokens[None], use_cache=False).logits[0], **CLOSE)
