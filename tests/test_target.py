"""pytest tests/test_target.py: the target decoder against transformers, its packing, and broken folders.

T packed tokens, K tapped layers, H hidden, V vocabulary.
"""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import model
from model import Target, TargetConfig, tap_layers

CLOSE = dict(rtol=1e-4, atol=1e-4)
LENGTHS = (9, 1, 14, 6)  # documents of the packed row
TAIL = 5  # padding after the last document
LAYERS = 4
IDS = [0, 1, 2]

# ---------------------------------------------------------------------------------------------------------
# Against transformers

SIZES = dict(
    vocab_size=83,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=10000.0,
)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=10000.0)
CASES = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-llama3-rope": ("Llama", dict(rope_parameters=LLAMA3, head_dim=16)),
    "llama-linear-rope": ("Llama", dict(rope_parameters=LINEAR, num_key_value_heads=1)),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=20, attention_bias=True)),
    "mistral-window": ("Mistral", dict(sliding_window=4)),
    "qwen2-12-of-2": (
        "Qwen2",
        dict(num_attention_heads=12, tie_word_embeddings=True, attention_bias=True),  # it has its own
    ),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=3, max_window_layers=2)),
    "qwen3": ("Qwen3", dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen3-tied-bias": ("Qwen3", dict(head_dim=20, attention_bias=True, tie_word_embeddings=True)),
}


@torch.no_grad()
def randomise(module: torch.nn.Module) -> None:
    """Weights, biases and norms all far from where they start, so that leaving one out shows."""
    random = torch.Generator().manual_seed(7)
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=random)
        if p.dim() == 2:
            p.copy_(noise * 1.5 * p.shape[1] ** -0.5)
        else:
            p.copy_(p.round() + 0.4 * noise)  # norms around 1, biases around 0


@pytest.fixture(scope="module", params=CASES)
def reference(request, tmp_path_factory):
    """(transformers model, folder it was saved to in several shards)."""
    transformers = pytest.importorskip("transformers")
    family, changes = CASES[request.param]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    hf = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(hf)
    folder = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return hf, folder


@torch.no_grad()
def hf_outputs(hf, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tapped features [T, K*H] and logits [T, V] of one document."""
    out = hf(tokens[None], output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1][0] for i in IDS], -1), out.logits[0]


def packed_row(vocab: int, lengths: tuple[int, ...] = LENGTHS, tail: int = TAIL, seed: int = 0):
    """tokens, positions and cu_seqlens of a packed row; the bounds end at the last real token, repeated."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (sum(lengths) + tail,), generator=random)
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(tail, dtype=torch.int64)])
    bounds = [0, *itertools.accumulate(lengths)]
    return tokens, positions, torch.tensor(bounds + bounds[-1:] * 3, dtype=torch.int32)


def test_features_and_logits_equal_transformers(reference):
    hf, folder = reference
    target = Target.load(folder)
    assert target.c.layers == LAYERS
    tokens = torch.randint(target.c.vocab, (31,), generator=torch.Generator().manual_seed(1))
    row = tokens, torch.arange(31), torch.tensor([0, 31], dtype=torch.int32), 31
    features, logits = hf_outputs(hf, tokens)
    torch.testing.assert_close(target.features(*row, IDS), features, **CLOSE)
    torch.testing.assert_close(target.logits(*row), logits, **CLOSE)
    # Each tap lands in its own place, in the order of ids, also in a buffer that is handed in.
    out = torch.full((31, 2 * target.c.hidden), torch.nan)
    target.features(*row, [0, 2], out)
    hidden = target.c.hidden
    torch.testing.assert_close(out, torch.cat([features[:, :hidden], features[:, 2 * hidden :]], 1), **CLOSE)


def test_packed_documents_equal_transformers_one_by_one(reference):
    hf, folder = reference
    target = Target.load(folder)
    tokens, positions, bounds = packed_row(target.c.vocab)
    features = target.features(tokens, positions, bounds, max(LENGTHS), IDS)
    logits = target.logits(tokens, positions, bounds, max(LENGTHS))
    for start, end in itertools.pairwise([0, *itertools.accumulate(LENGTHS)]):
        alone_features, alone_logits = hf_outputs(hf, tokens[start:end])
        torch.testing.assert_close(features[start:end], alone_features, **CLOSE)
        torch.testing.assert_close(logits[start:end], alone_logits, **CLOSE)
    assert features.isfinite().all()  # the padding tail too: the drafter projects it


def test_embedding_and_head_are_the_targets(reference):
    hf, folder = reference
    embedding, head = model.load_embedding_and_head(folder, "cpu", torch.float32)
    assert torch.equal(embedding, hf.get_input_embeddings().weight)
    assert torch.equal(head, hf.get_output_embeddings().weight)
    assert torch.equal(Target.load(folder).head_VH, head)


# ---------------------------------------------------------------------------------------------------------
# Folders of our own, so that everything below runs without transformers

CONFIG = dict(
    SIZES,
    architectures=["LlamaForCausalLM"],
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    tie_word_embeddings=False,
    hidden_act="silu",
)


def write_folder(folder, **changes):
    """A random model folder of one shard."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    target = Target(TargetConfig.from_folder(folder))
    randomise(target)
    weights = {name: place.clone() for name, place in model._weight_places(target)}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "target")


def test_changing_one_document_leaves_the_others(folder):
    target = Target.load(folder)
    tokens, positions, bounds = packed_row(target.c.vocab)
    before = target.features(tokens, positions, bounds, max(LENGTHS), IDS)
    for start, end in itertools.pairwise([0, *itertools.accumulate(LENGTHS)]):
        changed = tokens.clone()
        changed[start:end] = (changed[start:end] + 1) % target.c.vocab
        after = target.features(changed, positions, bounds, max(LENGTHS), IDS)
        same = (after == before).all(1)
        assert not same[start:end].any()
        assert same[:start].all() and same[end:].all()


def test_changing_a_token_leaves_what_came_before(folder):
    target = Target.load(folder)
    tokens, positions, bounds = packed_row(target.c.vocab, (20,), 0)
    before = target.features(tokens, positions, bounds, 20, IDS)
    tokens[11] = (tokens[11] + 1) % target.c.vocab
    same = (target.features(tokens, positions, bounds, 20, IDS) == before).all(1)
    assert same[:11].all() and not same[11:].any()


def test_padding_may_be_a_document_of_its_own(folder):
    target = Target.load(folder)
    tokens, positions, bounds = packed_row(target.c.vocab)
    as_document = torch.cat([bounds[:-1], torch.tensor([len(tokens)], dtype=torch.int32)])
    real = sum(LENGTHS)
    first = target.features(tokens, positions, bounds, max(LENGTHS), IDS)
    second = target.features(tokens, positions, as_document, max(LENGTHS), IDS)
    torch.testing.assert_close(first[:real], second[:real])


def test_bf16_keeps_rope_in_fp32(folder):
    target = Target.load(folder, dtype=torch.bfloat16)
    assert target.dtype == torch.bfloat16 and all(p.dtype == torch.bfloat16 for p in target.parameters())
    assert target.freq.dtype == torch.float32
    assert target.to(torch.bfloat16).freq.dtype == torch.float32
    cos, _ = model.rope_angles(torch.tensor([30000]), target.freq)
    exact = 30000 / 10000.0 ** (torch.arange(0, 12, 2, dtype=torch.float64) / 12)
    torch.testing.assert_close(cos[0, :6].double(), exact.cos(), rtol=0, atol=5e-3)


def test_tap_layers_table():
    table = {
        (36, 5): [1, 9, 17, 25, 33],
        (30, 5): [1, 8, 14, 20, 27],
        (28, 5): [1, 7, 13, 19, 25],
        (8, 5): [1, 2, 3, 4, 5],
        (7, 5): [0, 1, 2, 4, 5],
        (5, 5): [0, 1, 2, 3],
        (4, 5): [0, 1, 2],
        (3, 5): [0, 1],
        (2, 5): [0],
        (1, 5): [0],
        (36, 1): [18],
        (1, 1): [0],
        (4, 2): [0, 2],
    }
    assert {key: tap_layers(*key) for key in table} == table
    for layers, taps in itertools.product(range(2, 81), range(2, 9)):
        ids = tap_layers(layers, taps)
        assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= layers - 2
        assert len(ids) == min(taps, max(1, layers - 1))
    with pytest.raises(ValueError, match="at least 1"):
        tap_layers(4, 0)


def test_only_what_training_needs_is_loaded(folder, monkeypatch):
    whole = Target.load(folder)
    read = []

    def spy(*args):
        for name, weight in read_weights(*args):
            read.append(name)
            yield name, weight

    read_weights = model.read_weights
    monkeypatch.setattr(model, "read_weights", spy)
    part = Target.load(folder, layers=2, head=False)
    assert len(part.layers) == 2 and part.norm is None and part.lm_head is None
    expected = {f"model.layers.{i}" for i in range(2)} | {"model.embed_tokens"}
    assert {name.removesuffix(".weight")[: len("model.layers.0")] for name in read} == {
        name[: len("model.layers.0")] for name in expected
    }
    assert len(read) == len(set(read)) == 1 + 2 * 9
    tokens, positions, bounds = packed_row(part.c.vocab)
    row = tokens, positions, bounds, max(LENGTHS)
    assert torch.equal(part.features(*row, [0, 1]), whole.features(*row, [0, 1]))
    assert not any(p.requires_grad for p in part.parameters())


def test_features_stop_after_the_last_tap(folder, monkeypatch):
    target = Target.load(folder)
    ran = []
    monkeypatch.setattr(
        target, "run_layer", lambda layer, *a: ran.append(layer) or model.TargetLayer.forward(layer, *a)
    )
    target.features(*packed_row(target.c.vocab), max(LENGTHS), [0, 1])
    assert ran == list(target.layers)[:2]


def test_old_and_new_rope_fields_mean_the_same(tmp_path):
    llama3 = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    new_and_old = [
        (
            dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)),
            dict(rope_theta=5e5, rope_scaling=None),
        ),
        (
            dict(rope_parameters=llama3 | dict(rope_theta=5e5)),
            dict(rope_theta=5e5, rope_scaling=llama3),
        ),
        (
            dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=7e4)),
            dict(rope_theta=7e4, rope_scaling=dict(type="linear", factor=4.0)),
        ),
    ]
    for new, old in new_and_old:
        frequencies = []
        for form in (new, old):
            config = {k: v for k, v in CONFIG.items() if k != "rope_parameters"} | form
            (tmp_path / "config.json").write_text(json.dumps(config))
            c = TargetConfig.from_folder(tmp_path)
            assert c.rope_theta == old["rope_theta"]
            frequencies.append(model.rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))
        assert torch.equal(*frequencies)


def test_sliding_window_fields(tmp_path):
    """Which layers slide, for the fields each family reads."""

    def windows(architecture: str, **fields) -> tuple[int, ...]:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields | {"architectures": [architecture]}))
        return TargetConfig.from_folder(tmp_path).windows

    assert windows("MistralForCausalLM", sliding_window=9) == (9, 9, 9, 9)
    assert windows("MistralForCausalLM", sliding_window=None) == (0, 0, 0, 0)
    assert windows("LlamaForCausalLM", sliding_window=9) == (0, 0, 0, 0)
    qwen = dict(sliding_window=9, max_window_layers=3)
    assert windows("Qwen2ForCausalLM", use_sliding_window=False, **qwen) == (0, 0, 0, 0)
    assert windows("Qwen2ForCausalLM", use_sliding_window=True, **qwen) == (0, 0, 0, 9)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("Qwen3ForCausalLM", use_sliding_window=True, **qwen, layer_types=kinds) == (9, 0, 9, 0)


# ---------------------------------------------------------------------------------------------------------
# Broken folders: one clear line each


def edit_config(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))

    return edit


def edit_weights(change):
    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit


def edit_file(name, change):
    def edit(folder):
        change(folder / name)

    return edit


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def index_to(name):
    def edit(folder):
        index = {"weight_map": {"model.embed_tokens.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return edit


NORM, DOWN = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.down_proj.weight"
BROKEN = {
    "architecture": (
        edit_config(architectures=["GemmaForCausalLM"]),
        "GemmaForCausalLM is not supported.*LlamaForCausalLM, Mistral.*, Qwen2.*, Qwen3ForCausalLM",
    ),
    "no architecture": (edit_config(architectures="absent"), "architecture none is not supported.*Qwen3"),
    "no config": (edit_file("config.json", lambda p: p.unlink()), "config.json: cannot be read.*--target"),
    "config cut off": (edit_file("config.json", lambda p: p.write_text('{"a": ')), "config.json: not JSON"),
    "config a list": (edit_file("config.json", lambda p: p.write_text("[1]")), "config.json: .*supported"),
    "no hidden size": (edit_config(hidden_size="absent"), "field 'hidden_size' is missing"),
    "no layers": (edit_config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "heads": (edit_config(num_key_value_heads=3), "4 query heads are not a multiple of 3"),
    "activation": (edit_config(hidden_act="gelu"), "hidden_act gelu is not supported"),
    "RoPE kind": (
        edit_config(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4)),
        "'yarn' is not supported.*default, linear or llama3",
    ),
    "old RoPE kind": (edit_config(rope_parameters=None, rope_scaling=dict(type="dynamic")), "'dynamic'"),
    "RoPE field": (
        edit_config(rope_parameters=dict(LLAMA3, low_freq_factor=None)),
        "config.json: .*low_freq_factor",
    ),
    "linear without factor": (edit_config(rope_parameters=dict(rope_type="linear")), "config.json: .*factor"),
    "RoPE by layer kind": (
        edit_config(rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e4))),
        "config.json: .*full_attention",
    ),
    "layer kinds": (edit_config(layer_types=["full_attention"]), "layer_types.* 1 .* 4 "),
    "unknown layer kind": (edit_config(layer_types=["linear_attention"] * 4), "linear_attention"),
    "missing weight": (edit_weights(lambda w: w.pop(NORM)), f"{NORM} is missing"),
    "missing head": (edit_weights(lambda w: w.pop("lm_head.weight")), "lm_head.weight is missing"),
    "extra weight": (
        edit_weights(lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})),
        "unexpected weight model.layers.0.self_attn.q_proj.bias",
    ),
    "wrong shape": (
        edit_weights(lambda w: w.update({DOWN: w[DOWN][:, 1:].contiguous()})),
        rf"{DOWN} is \[48, 39\], config.json says \[48, 40\]",
    ),
    "truncated": (edit_file("model.safetensors", truncate), "model.safetensors: not a whole safetensors"),
    "empty": (
        edit_file("model.safetensors", lambda p: p.write_bytes(b"")),
        "model.safetensors: not a whole safetensors",
    ),
    "no weights": (edit_file("model.safetensors", lambda p: p.unlink()), "model.safetensors: not found"),
    "index up": (index_to("../target/model.safetensors"), "not a file of this folder.*do not trust"),
    "index parent": (index_to(".."), "not a file of this folder"),
    "index absolute": (index_to("/etc/passwd"), "not a file of this folder"),
    "index number": (index_to(3), "not a file of this folder"),
    "index of a lost shard": (index_to("model-00001-of-00002.safetensors"), "00002.safetensors: not found"),
    "index cut off": (
        edit_file("model.safetensors.index.json", lambda p: p.write_text('{"weight_map"')),
        "index.json: not JSON",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_is_one_clear_line(folder, case):
    Target.load(folder)
    edit, message = BROKEN[case]
    edit(folder)
    with pytest.raises(ValueError, match=message) as error:
        Target.load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_stored_tied_head_and_rotary_frequencies_are_no_surprise(tmp_path):
    folder = write_folder(tmp_path / "tied", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(weights, folder / "model.safetensors")
    target = Target.load(folder)
    assert target.head_VH is target.embed_tokens.weight


# ---------------------------------------------------------------------------------------------------------
# GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("heads", [(4, 4), (12, 2)])
def test_varlen_attention_equals_the_dense_route(heads, window):
    """The GPU kernel in bf16 against the CPU route in fp32 on the same rounded numbers."""
    lengths = (150, 1, 300, 40)
    _, _, bounds = packed_row(10, lengths, 21)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths) + 21, n, 64, generator=random).bfloat16() for n in (*heads, heads[1]))
    slow = model.packed_causal_attention(q.float(), k.float(), v.float(), bounds, max(lengths), window)
    fast = model.packed_causal_attention(
        q.cuda(), k.cuda(), v.cuda(), bounds.cuda(), max(lengths), window
    ).cpu()
    torch.testing.assert_close(fast.float(), slow, rtol=2e-2, atol=2e-2)
    assert not fast[sum(lengths) :].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_target_on_gpu_equals_cpu(tmp_path):
    folder = write_folder(tmp_path / "gpu", hidden_size=128, head_dim=64, num_attention_heads=12)
    tokens, positions, bounds = packed_row(SIZES["vocab_size"])
    slow = Target.load(folder).logits(tokens, positions, bounds, max(LENGTHS))
    target = Target.load(folder, "cuda", torch.bfloat16)
    fast = target.logits(tokens.cuda(), positions.cuda(), bounds.cuda(), max(LENGTHS)).cpu().float()
    real = sum(LENGTHS)
    error = (fast - slow)[:real].norm() / slow[:real].norm()
    assert fast.isfinite().all() and error < 0.05, error
