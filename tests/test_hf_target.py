"""pytest tests/test_hf_target.py: targets through transformers, against the same models run plainly.

T packed tokens, K tapped layers, H hidden, V vocabulary.
"""

import dataclasses
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file
from test_target import IDS, LAYERS, SIZES, TAIL, packed_row, randomise

import checkpoint
import hf_target
import model

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
CLOSE = dict(rtol=1e-4, atol=1e-4)
LENGTHS = (9, 1, 13, 11, 10, 8)  # which run as 1; 8, 9 and 10; 11 and 13
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=24, mamba_d_state=8, mamba_n_groups=1)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
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
    tokens, positions, bounds = packed_row(target.c.vocab, LENGTHS)
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


def test_only_the_layers_up_to_the_last_tap_are_loaded_and_counted(reference):
    hf, folder = reference
    target = hf_target.Target.load(folder, layers=3, head=False)
    assert sum(p.numel() for p in target.hf.parameters()) == target.c.parameters(3)
    assert sum(p.numel() for p in hf.parameters()) == target.c.parameters(LAYERS, head=True)
    assert target.c.layers == LAYERS and 0 < target.c.prefill_flops(1, 3) <= 2 * target.c.parameters(3)


def save(folder: Path, name: str, changes: dict) -> Path:
    make(name, changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_both_backends_give_the_same(tmp_path, name):
    folder = save(tmp_path, name, dict(head_dim=16, tie_word_embeddings=name == "Qwen3"))
    row = packed_row(SIZES["vocab_size"], LENGTHS)
    ours, theirs = (m.Target.load(folder, layers=3, head=False) for m in (model, hf_target))
    one, other = (target.features(*row, max(LENGTHS), IDS)[: sum(LENGTHS)] for target in (ours, theirs))
    torch.testing.assert_close(one, other, **CLOSE)
    tables = [m.load_embedding_and_head(folder, "cpu", torch.float32) for m in (model, hf_target)]
    for one, other in zip(*tables, strict=True):
        assert torch.equal(one, other)
    assert (tables[1][0] is tables[1][1]) == (name == "Qwen3")  # tied and not scaled: one table in memory
    a, b = (m.TargetConfig.from_folder(folder) for m in (model, hf_target))
    drafters = [model.DrafterConfig.of(c, 2, 8, 5, 4) for c in (a, b)]
    wide = max(a.intermediate, 3 * a.hidden)
    assert dataclasses.replace(drafters[0], intermediate=wide) == drafters[1]
    assert a.prefill_flops(7, 3) == pytest.approx(b.prefill_flops(7, 3), rel=0.02)  # theirs counts the norms


@pytest.mark.parametrize("case", ["mixtral", "qwen3-next", "bamba"])
def test_a_documents_features_do_not_depend_on_the_others(tmp_path, case):
    target = hf_target.Target.load(save(tmp_path, *CASES[case]), layers=3, head=False)
    tokens, positions, bounds = packed_row(target.c.vocab, (9, 8, 10, 3))
    features = target.features(tokens, positions, bounds, 10, IDS)
    changed = tokens.clone()
    changed[:9], changed[17:] = 5, 6  # all but the second document, which runs with the first and third
    others = target.features(changed, positions, bounds, 10, IDS)
    torch.testing.assert_close(others[9:17], features[9:17], **CLOSE)
    assert not torch.allclose(others[:9], features[:9], rtol=0.1)


def test_documents_run_in_groups_of_like_length():
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 300, (200,), generator=random).tolist()
    bounds = [0, *itertools.accumulate(lengths)]
    groups = list(hf_target.like_lengths(bounds))
    documents = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    assert sorted(d for group in groups for d in group) == documents
    for group in groups:
        sizes = [b - a for a, b in group]
        assert max(sizes) <= hf_target.PADDING * min(sizes)
    assert len(groups) < 25
    limited = list(hf_target.like_lengths(bounds, 50_000))
    assert sorted(d for group in limited for d in group) == documents
    for group in limited:
        assert len(group) == 1 or len(group) * max(b - a for a, b in group) ** 2 <= 50_000
    assert len(groups) < len(limited) < len(documents)


def test_a_target_whose_documents_reach_each_other_is_refused(tmp_path, monkeypatch):
    folder = save(tmp_path, *CASES["mixtral"])
    layer = transformers.models.mixtral.modeling_mixtral.MixtralDecoderLayer
    plain = layer.forward

    def leaky(self, hidden_states, *args, **kwargs):
        out = plain(self, hidden_states, *args, **kwargs)
        return out + 0.1 * hidden_states.roll(-1, 1)  # each token gets a little of the next one

    monkeypatch.setattr(layer, "forward", leaky)
    with pytest.raises(ValueError, match=r"features of a document differ by \d"):
        hf_target.Target.load(folder, layers=3, head=False)


def test_the_drafters_shape_follows_the_config_and_has_defaults(tmp_path):
    gemma = hf_target.TargetConfig.from_folder(save(tmp_path / "a", *CASES["gemma3"]))
    assert (gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.eps) == (4, 2, 16, 1e-5)
    assert gemma.rope_theta == 1e6 and gemma.softcap == 20.0  # of full attention; its windows' is 1e4
    oss = hf_target.TargetConfig.from_folder(save(tmp_path / "b", *CASES["gpt-oss"]))
    assert oss.rope_scaling is None and oss.rope_theta == 150000.0  # a yarn target, a plain drafter
    assert oss.intermediate == 3 * oss.hidden  # its own is that of one small expert
    layer = make(*CASES["gpt-oss"]).model.layers[0]
    experts = sum(p.numel() for p in layer.mlp.experts.parameters())
    assert oss.active[0] == oss.of_layers[0] - experts // 2  # two of four
    mamba = hf_target.TargetConfig.from_folder(save(tmp_path / "c", *CASES["mamba2"]))
    model.DrafterConfig.of(mamba, 2, 8, 5, 4)  # no attention to take a shape from, still a drafter
    sees = transformers.Gemma3Config(
        text_config=SIZES | dict(head_dim=16, sliding_window=4),
        vision_config=dict(
            hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
    )  # fmt: skip
    whole = transformers.Gemma3ForConditionalGeneration(sees).eval()
    whole.save_pretrained(tmp_path / "d")
    target = hf_target.Target.load(tmp_path / "d", layers=3, head=False)
    tokens = torch.arange(9)
    features = target.features(tokens, tokens, torch.tensor([0, 9], dtype=torch.int32), 9, IDS)
    states = plain_states(whole.model.language_model, tokens)
    torch.testing.assert_close(features, torch.cat([states[i + 1] for i in IDS], -1), **CLOSE)


# ---------------------------------------------------------------------------------------------------------
# What is refused, in one line


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def everything(folder: Path) -> None:
    hf_target.Target.load(folder, layers=2, head=False)
    hf_target.load_embedding_and_head(folder, "cpu", torch.float32)


REFUSED = {
    "bias": ("Phi", {}, {}, "its head has a bias"),
    "positions": ("GPT2", dict(n_embd=48, n_layer=4, n_head=4), {}, "depends on the position"),
    "quantized": (*CASES["mixtral"], dict(quantization_config={"quant_method": "fp8"}), "quantized weights"),
    "own-code": (
        *CASES["mixtral"],
        dict(model_type="evil", auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"}),
        "its own code .* is never run",
    ),
    "no-language": (*CASES["mixtral"], dict(model_type="vit"), "no language model"),
    "layers": (*CASES["mixtral"], dict(num_hidden_layers=1 << 30), "num_hidden_layers is 1073741824"),
    "experts": (*CASES["mixtral"], dict(num_local_experts=1 << 40), "num_local_experts is 1099511627776"),
    "shape": (*CASES["mixtral"], dict(hidden_size=96), "cannot load the model"),
    "more-layers": (*CASES["mixtral"], dict(num_hidden_layers=5), None),  # only two are needed
    "type": (*CASES["mixtral"], dict(model_type=["mixtral"]), "is unknown to transformers"),
    "words": (*CASES["mixtral"], dict(hidden_size="many"), "cannot|hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line_that_says_what_to_do(tmp_path, case):
    name, config, changes, words = REFUSED[case]
    folder = save(tmp_path, name, config)
    (folder / "evil.py").write_text("raise SystemExit('the code of a model folder ran')\n")
    edit_config(folder, **changes)
    if words is None:
        everything(folder)
        return
    with pytest.raises(ValueError, match=words) as caught:
        everything(folder)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(str(folder)) and line.count(": ") >= 2 and len(line) < 600


def test_missing_weights_and_pickles_are_refused(tmp_path):
    folder = save(tmp_path, *CASES["mixtral"])
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"weight model\.layers\.1\.self_attn\.q_proj\.weight is missing"):
        hf_target.Target.load(folder, layers=2, head=False)
    index = {"weight_map": dict.fromkeys(weights, "../model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not a file of this folder"):
        hf_target.Target.load(folder, layers=2, head=False)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot load the model"):
        hf_target.Target.load(folder, layers=2, head=False)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "another"}')
    with pytest.raises(ValueError, match="an adapter of another model: merge"):
        hf_target.Target.load(folder, layers=2, head=False)


def test_a_head_that_does_something_else_is_refused(tmp_path, monkeypatch):
    folder = save(tmp_path, *CASES["mixtral"])
    head = transformers.MixtralForCausalLM
    plain = head.forward

    def changed(self, **kwargs):
        out = plain(self, **kwargs)
        out.logits = out.logits.abs()
        return out

    monkeypatch.setattr(head, "forward", changed)
    with pytest.raises(ValueError, match="more than a scaled"):
        hf_target.load_embedding_and_head(folder, "cpu", torch.float32)
    capped = save(tmp_path / "capped", *CASES["gemma3"])
    everything(capped)
    plain_shape = hf_target._shape
    monkeypatch.setattr(
        hf_target, "_shape", lambda *a: dataclasses.replace(plain_shape(*a), softcap=0.0)
    )  # a cap that the config does not tell
    with pytest.raises(ValueError, match="more than a scaled"):
        everything(capped)


def test_config_names_neither_code_nor_a_kernel_and_the_hub_is_never_asked(tmp_path):
    folder = save(tmp_path, *CASES["mixtral"])
    (folder / "evil.py").write_text("raise SystemExit('the code of a model folder ran')\n")
    own = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"}
    edit_config(folder, attn_implementation="some/kernel", _attn_implementation="some/kernel", auto_map=own)
    target = hf_target.Target.load(folder, layers=2, head=False)
    assert target.hf.config._attn_implementation == "sdpa"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_without_transformers_there_is_one_line_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'transformers>=5,<6'$"):
        hf_target.TargetConfig.from_folder(tmp_path)


def test_the_loss_of_a_soft_capped_target_is_that_of_capped_logits(tmp_path):
    folder = save(tmp_path, *CASES["gemma3"])
    t = hf_target.TargetConfig.from_folder(folder)
    c = model.DrafterConfig.of(t, 1, 4, 3, 7)
    assert c.softcap == 20.0
    drafter = model.Drafter(c, *hf_target.load_embedding_and_head(folder, "cpu", torch.float32))
    with torch.no_grad():
        drafter.norm.weight.mul_(30)  # logits far beyond the cap
    at = torch.arange(24)
    row = at % t.vocab, at, torch.zeros(24, dtype=torch.int32), torch.ones(24, dtype=torch.bool)
    blocks = model.make_blocks(*row, torch.tensor([3, 9, 15, -1]), 4, 4.0, 7)
    kv = drafter.context_keys_values(torch.randn(24, 3 * t.hidden), at)
    loss, predicted = drafter(kv, blocks)
    loss.backward(retain_graph=True)
    found = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    h = drafter.hidden(kv, blocks).unflatten(0, (-1, 4))[:, 1:].flatten(0, 1)
    plain = h @ drafter.head.T
    assert plain.abs().max() > 2 * c.softcap
    capped = c.softcap * torch.tanh(plain / c.softcap)
    each = torch.nn.functional.cross_entropy(capped, blocks.labels_AB[:, 1:].flatten(), reduction="none")
    expected = (each * blocks.weights_AB[:, 1:].flatten()).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert torch.equal(predicted.flatten(), plain.argmax(-1))
    for name, p in drafter.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5)
    published = checkpoint.export_config(c)  # as published drafters of such targets have it
    for place in (published, published["dflash_config"]):  # vLLM and SGLang look in different places
        assert place.pop("final_logit_softcapping") == 20.0
        assert checkpoint.parse_export(published, t, 3 * t.hidden).softcap == (
            20.0 if place is published else 0
        )


# ---------------------------------------------------------------------------------------------------------
# A run


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A small mixture of experts with the built-in target's tokenizer."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = dict(vocab_size=1024, hidden_size=64, max_position_embeddings=512, eos_token_id=8)
    save(folder, "Qwen3Moe", CASES["qwen3-moe"][1] | sizes)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def test_training_with_a_mixture_of_experts_learns_the_same_in_both_layouts(
    launcher, small, experts, tmp_path
):
    flags = [*small, "--target", experts, "--target-backend", "transformers", "--batches-per-step", "2"]
    flags += ["--steps", "12", "--lr", "3e-3", "--block-size", "8", "--eval-every", "12"]
    alone = launcher.run(1, tmp_path / "alone", *flags, limit_s=180).good().records()
    split = launcher.run(2, tmp_path / "split", *flags, limit_s=180).good().records()
    losses = [[r["loss"] for r in records if "loss" in r] for records in (alone, split)]
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    evaluations = [[r["eval_loss"] for r in records if "eval_loss" in r] for records in (alone, split)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)
    assert evaluations[0][-1] < evaluations[0][0] - 0.5


def test_the_other_scripts_say_which_targets_they_take(launcher, experts, tmp_path):
    refused = launcher.run(1, tmp_path / "native", "--target", experts, "--data", "nowhere.jsonl")
    assert refused.codes == [2]
    assert "Qwen3MoeForCausalLM is not supported" in refused.text
    assert "--target-backend transformers" in refused.text
    wrong = launcher.run(1, tmp_path / "wrong", "--target-backend", "other")
    assert wrong.codes == [2] and "give native or transformers" in wrong.text
