"""Targets that model.py does not know, through the transformers library.

    torchrun --nproc_per_node=8 train.py --target DIR --data FILE... --target-backend transformers

The same three names as model.py has for its own targets: a config from a folder, the frozen target that makes
features, the embedding and head for a drafter rank. Nothing is fetched and no code of the model folder runs.

Shape letters: T packed tokens, D documents run together, L longest of them, K tapped layers, H hidden,
V vocabulary.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import model
from data import read_json, short
from model import MOST_LAYERS, WIDEST, number, real

VERSIONS = "transformers>=5,<6"
SCORES = 1 << 28  # attention scores at a time where the library can only form them whole
# Documents share a padded batch while the longest is at most so much longer than the shortest.
PADDING = 4 / 3
EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps")
CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
EXPERT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


def library():
    """The transformers module, silent and offline; ValueError with the command where it is missing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model folder must not make it fetch anything
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"--target-backend transformers: cannot be imported ({short(str(error), 100)}): "
            f"pip install '{VERSIONS}'"
        ) from None
    if not transformers.__version__.startswith("5."):
        raise ValueError(
            f"--target-backend transformers: version {transformers.__version__} is not supported: "
            f"pip install '{VERSIONS}'"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers")
    return transformers


class Unfit(ValueError):
    """The model does something that a drafter cannot follow; the message is what."""


@contextlib.contextmanager
def one_line(folder: str | Path, doing: str) -> Iterator[None]:
    """Whatever the library raises over a folder becomes one line; running out of memory is told elsewhere."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Unfit as error:
        raise ValueError(f"{folder}: {error}: use another model") from None
    except Exception as error:
        why = short(" ".join(f"{error}".split()) or type(error).__name__, 200)
        raise ValueError(
            f"{folder}: transformers cannot {doing} ({why}): fetch the folder again, or use another model"
        ) from None


# ---------------------------------------------------------------------------------------------------------
# What is known before any weight is read


@dataclasses.dataclass(frozen=True)
class TargetConfig(model.TargetConfig):
    """What a drafter takes from the target; counts are of its modules, built without storage."""

    softcap: float  # of the logits, 0: none
    ends: int  # parameters outside the layers, the head left out
    head: int
    of_layers: tuple[int, ...]
    active: tuple[int, ...]  # of those, what one token meets: not the experts it is not sent to
    mlp_width: int  # numbers a token takes in the largest MLP, roughly
    eager: bool  # attention forms all its scores

    def prefill_flops(self, tokens: int, layers: int) -> float:
        """FLOPs of the products of `layers` layers over so many tokens, padding left out."""
        return 2.0 * tokens * sum(self.active[:layers])

    def parameters(self, layers: int, head: bool = False) -> int:
        return self.ends + head * self.head + sum(self.of_layers[:layers])

    def features_bytes(self, tokens: int, size: int = 2) -> int:
        """A rough estimate, since each architecture has a forward pass of its own: some ten hidden states,
        attention's and the MLP's inner ones, of padded documents; whole scores where attention is eager.
        """
        width = 10 * self.hidden + 4 * (self.heads + 2 * self.kv_heads) * self.head_dim + self.mlp_width
        scores = max(SCORES, min(tokens, 4096) ** 2 * self.heads) if self.eager else 0
        return int(PADDING * tokens) * width * size + scores * (2 * size + 4)

    @staticmethod
    def from_folder(folder: str | Path) -> "TargetConfig":
        """Read `config.json`; ValueError names what is missing or not supported."""
        config = read_config(folder)
        text = config.get_text_config(decoder=True)
        with one_line(folder, "build the model of config.json"), torch.device("meta"):
            hf = model_class(folder, config)(config)
        try:
            return _shape(text, hf)
        except ValueError as error:
            raise ValueError(f"{folder}/config.json: {error}: use another model") from None


def read_config(folder: str | Path):
    """The library's config of a folder; ValueError where it cannot or must not be used."""
    path = Path(folder) / "config.json"
    c = read_json(path, "fetch the model folder again")
    if c is None:
        raise ValueError(f"{path}: cannot be read (no such file): --target takes a model folder")
    transformers = library()
    kind = short(str(c.get("model_type")), 60)
    if not isinstance(c.get("model_type"), str) or (
        c["model_type"] not in transformers.models.auto.configuration_auto.CONFIG_MAPPING
    ):
        code = "its own code (auto_map) is never run: " if "auto_map" in c else ""
        raise ValueError(
            f"{path}: model_type {kind} is unknown to transformers {transformers.__version__}: {code}"
            "use another model or a newer transformers"
        )
    if (path.parent / "adapter_config.json").exists():
        raise ValueError(f"{path.parent}: holds an adapter of another model: merge the two first")
    if c.get("quantization_config") is not None:
        raise ValueError(f"{path}: quantized weights are not supported: fetch or write the model in bfloat16")
    with one_line(folder, "read config.json"):
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        text = config.get_text_config(decoder=True)
    try:  # before anything is built by them
        _number(text, ("num_hidden_layers",), most=MOST_LAYERS)
        for names in (("hidden_size",), ("vocab_size",), ("num_attention_heads",), EXPERT_NAMES):
            _number(text, names, 1)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: fetch the model folder again, or use another model") from None
    return config


def model_class(folder: str | Path, config) -> type:
    """The library's language model for a config, be it one that sees images as well."""
    transformers = library()
    auto = transformers.models.auto.modeling_auto
    listed = auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    known = next((models for models in listed if type(config) in models), None)
    if known is None:
        raise ValueError(
            f"{folder}/config.json: transformers {transformers.__version__} has no language model for "
            f"model_type {short(str(config.model_type), 60)}: use another model"
        )
    found = known[type(config)]
    # Never what config.json names: that could be a kernel from the hub.
    config._attn_implementation = "sdpa" if found._supports_sdpa else "eager"
    return found


def _number(text, names: tuple[str, ...], default: int | None = None, most: int = 1 << 24) -> int:
    """The first of the config's fields with such a name that holds something, in bounds."""
    name = next((n for n in names if getattr(text, n, None) is not None), names[0])
    return number({name: getattr(text, name, None)}, name, default, most)


def _shape(text, hf: nn.Module) -> TargetConfig:
    """The drafter's shape from the target's config, with defaults where an architecture has no such thing."""
    layers, embedding, head = decoder_layers(hf)[1], hf.get_input_embeddings(), hf.get_output_embeddings()
    hidden, vocab = _number(text, ("hidden_size",)), embedding.weight.shape[0]
    if not isinstance(head, nn.Linear) or head.weight.shape != (vocab, hidden):
        raise Unfit(f"its head is no {vocab} x {hidden} matrix, which the drafter would share")
    if head.bias is not None:
        raise Unfit("its head has a bias, which the drafter's loss and the servers do not know")
    heads = _number(text, ("num_attention_heads",), max(1, hidden // 128))
    kv_heads, head_dim = (
        _number(text, ("num_key_value_heads",), heads),
        _number(text, ("head_dim",), hidden // heads),
    )
    if heads % kv_heads:
        kv_heads = heads
    model.check_heads(heads, kv_heads, head_dim)
    wide = getattr(text, "intermediate_size", None)
    if type(wide) is not int or wide < 1.5 * hidden:  # none, one a layer, or one small expert's
        wide = 3 * hidden
    theta, scaling = rope(text)
    chosen = _count(text, CHOSEN_NAMES, 0)
    of_expert = _count(text, ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"), hidden)
    first = {p: i for i in reversed(range(len(layers))) for p in layers[i].parameters()}  # layers share some
    sizes = [sum(p.numel() for p, where in first.items() if where == i) for i in range(len(layers))]
    head_size = 0 if getattr(text, "tie_word_embeddings", False) else head.weight.numel()
    eps, cap = ({n: getattr(text, n, None)} for n in (_named(text, EPS_NAMES), _named(text, CAP_NAMES)))
    return TargetConfig(
        family=str(text.model_type),
        hidden=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=wide,
        vocab=vocab,
        eps=real(eps, next(iter(eps)), 1e-6, 1e-20, 1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=False,  # for the memory estimate: a scaled embedding is a table of its own
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=True,
        windows=(0,) * len(layers),
        max_position=_number(text, ("max_position_embeddings",), 1 << 15, WIDEST),
        softcap=real(cap, next(iter(cap)), 0.0, 0.0, 1e6),
        ends=sum(p.numel() for p in hf.parameters()) - sum(sizes) - head_size,
        head=head_size,
        of_layers=tuple(sizes),
        active=tuple(_active(layer, text) for layer in layers),
        mlp_width=max(4 * wide, chosen * (hidden + 3 * of_expert)),
        eager=text._attn_implementation == "eager",
    )


def _count(text, names: tuple[str, ...], default: int) -> int:
    """As `_number`, for what only an estimate needs: never a reason to refuse."""
    value = getattr(text, _named(text, names), None)
    return value if type(value) is int and value > 0 else default


def _named(text, names: tuple[str, ...]) -> str:
    return next((n for n in names if getattr(text, n, None) is not None), names[0])


def _active(layer: nn.Module, text) -> int:
    """Parameters of a layer that one token meets."""
    experts = _count(text, EXPERT_NAMES, 1)
    share = min(1.0, _count(text, CHOSEN_NAMES, experts) / experts)
    return int(sum(p.numel() * (share if "experts." in name else 1) for name, p in layer.named_parameters()))


def rope(text) -> tuple[float, dict | None]:
    """(theta, scaling) for the drafter, which has a RoPE of its own: the target's where it is a simple one,
    of the full attention where layers differ.
    """
    found = getattr(text, "rope_parameters", None) or {}
    found = found.get("full_attention") or found if isinstance(found, dict) else {}
    try:
        return model.parse_rope({"rope_parameters": found})
    except ValueError:
        theta = found.get("rope_theta")
        return model.parse_rope({"rope_theta": theta if isinstance(theta, (int, float)) else None})


def decoder_layers(hf: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """(the module that embeds tokens and runs the layers, its list of layers); Unfit if not to be found."""
    wanted = hf.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        (owner, child)
        for owner in hf.get_decoder().modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child) == wanted
    ]
    if len(found) != 1:
        raise Unfit(f"it has {len(found)} lists of {wanted} layers, not one")
    return found[0]


# ---------------------------------------------------------------------------------------------------------
# Weights


def load(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype, layers: int, head: bool
) -> tuple[nn.Module, nn.Module, nn.ModuleList]:
    """The frozen model without the layers from `layers` on, which are never read; then as decoder_layers."""
    config = read_config(folder)
    model.weight_files(folder)  # paths in an index cannot leave the folder
    whole, found = model_class(folder, config), []

    def cut(self, *args, **kwargs):
        whole.__init__(self, *args, **kwargs)
        found.extend(decoder_layers(self))
        del found[1][layers:]
        if not head:
            self.set_output_embeddings(nn.Identity())
        kept = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        tied = self.all_tied_weights_keys.items()
        self.all_tied_weights_keys = {a: b for a, b in tied if a in kept and b in kept}

    part = type(whole.__name__, (whole,), {"__init__": cut, "__module__": whole.__module__})
    direct = {"device_map": {"": device}} if importlib.util.find_spec("accelerate") else {}
    with one_line(folder, "load the model"):
        hf, said = part.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,  # a pickle can run code
            output_loading_info=True,
            attn_implementation=config._attn_implementation,
            **direct,
        )
        hf = hf.to(device).requires_grad_(False).eval()
    if missing := sorted(said["missing_keys"]):
        raise ValueError(
            f"{folder}: weight {short(missing[0], 80)} is missing ({len(missing)} in all): "
            "fetch the model folder again"
        )
    return hf, *found


class Reached(Exception):
    """Thrown out of a forward pass when the last tapped layer is done."""


class Target:
    """The frozen LLM, run up to its last tapped layer.

    Documents of like length run together as a batch, padded at their ends: what follows cannot change what
    comes before in any causal layer, be it attention, a convolution or a recurrent state, while documents in
    one row would reach each other through all but the first of these. `load` tests that.
    """

    def __init__(self, c: TargetConfig, hf: nn.Module, body: nn.Module, layers: nn.ModuleList):
        self.c, self.hf, self.body = c, hf, body
        self.found: dict[int, Tensor] = {}
        self.ids: list[int] = []
        for i, layer in enumerate(layers):
            layer.register_forward_hook(lambda layer, inputs, output, i=i: self._keep(i, output))

    @staticmethod
    def load(
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: int | None = None,
        head: bool = True,
        progress: bool = False,
    ) -> "Target":
        """As model.Target.load, and with its documents tested not to reach each other."""
        c = TargetConfig.from_folder(folder)
        layers = layers or c.layers
        target = Target(c, *load(folder, device, dtype, layers, head))
        with one_line(folder, "run the model"):
            different = target.leak(range(layers))
        if not different < (1e-3 if dtype == torch.float32 else 5e-2):
            raise ValueError(
                f"{folder}: features of a document differ by {different:.1%} when others run with it: such a "
                "target cannot be trained for: use another model"
            )
        return target

    def _keep(self, i: int, output) -> None:
        if i in self.ids:
            self.found[i] = output[0] if isinstance(output, tuple) else output
        if self.ids and i == max(self.ids):
            raise Reached

    @torch.no_grad()
    def run(self, tokens_DL: Tensor, ids: list[int]) -> list[Tensor]:
        """Outputs [D, L, H] of the tapped layers for documents that are padded at their ends."""
        self.ids, self.found = ids, {}
        with contextlib.suppress(Reached):
            self.body(input_ids=tokens_DL, use_cache=False)
        found, self.found = [self.found.get(i) for i in ids], {}
        for i, x in zip(ids, found, strict=True):
            if not isinstance(x, Tensor) or x.shape != (*tokens_DL.shape, self.c.hidden):
                shape = list(x.shape) if isinstance(x, Tensor) else "nothing"
                raise Unfit(f"its layer {i} returns {shape}, not one hidden state a token")
        return found

    def features(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        ids: list[int],
        out_TKH: Tensor | None = None,
    ) -> Tensor:
        """Outputs of the tapped layers side by side, [T, K*H], as model.Target.features."""
        hidden, device = self.c.hidden, tokens_T.device
        if out_TKH is None:
            out_TKH = torch.empty(len(tokens_T), len(ids) * hidden, device=device, dtype=self.dtype)
        bounds = cu_seqlens.tolist()
        out_TKH[bounds[-1] :] = 0
        for documents in like_lengths(bounds, SCORES // self.c.heads if self.c.eager else 0):
            start_D, end_D = torch.tensor(documents).T
            at_DL = start_D[:, None] + torch.arange(int((end_D - start_D).max()))
            inside_DL = at_DL < end_D[:, None]
            from_N, to_N = (t.to(device) for t in (inside_DL.flatten().nonzero().flatten(), at_DL[inside_DL]))
            tokens = torch.zeros(at_DL.numel(), device=device, dtype=tokens_T.dtype)
            tokens[from_N] = tokens_T[to_N]
            for k, x_DLH in enumerate(self.run(tokens.view(at_DL.shape), ids)):
                out_TKH[to_N, k * hidden : (k + 1) * hidden] = x_DLH.flatten(0, 1)[from_N].to(out_TKH.dtype)
        return out_TKH

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.get_input_embeddings().weight.dtype

    def leak(self, ids: range) -> float:
        """By how much the end of a document changes when it is padded and others run with it.

        The relative distance of the last token's output, in the worst layer; the median of some documents,
        since in bf16 a token may now and then go to other experts.
        """
        random = torch.Generator().manual_seed(0)
        tokens_DL = torch.randint(self.c.vocab, (8, 24), generator=random).to(self.hf.device)
        together = self.run(tokens_DL, list(ids))
        alone = [self.run(tokens_L[None, :17], list(ids)) for tokens_L in tokens_DL]
        worst = 0.0
        for i, x_DLH in enumerate(together):
            x, y = x_DLH[:, 16].float(), torch.cat([one[i][:, 16] for one in alone]).float()
            apart = (x - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-9)
            worst = max(worst, apart.nan_to_num(math.inf).median().item())
        return worst


def like_lengths(bounds: list[int], scores: int = 0) -> Iterator[list[tuple[int, int]]]:
    """Documents (start, end) of a packed row, in groups that pad to little more than they are.

    `scores`: more than one document only while their padded lengths squared stay within it (0: no limit).
    """
    documents = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    documents.sort(key=lambda d: d[1] - d[0])
    while documents:
        most = PADDING * (documents[0][1] - documents[0][0])
        group = [d for d in documents if d[1] - d[0] <= most]
        while scores and len(group) > 1 and len(group) * (group[-1][1] - group[-1][0]) ** 2 > scores:
            group.pop()
        yield group
        documents = documents[len(group) :]


# ---------------------------------------------------------------------------------------------------------
# Embedding and head for the drafter


@torch.no_grad()
def load_embedding_and_head(
    folder: str | Path, device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The target's frozen (embedding [V, H], head [V, H]), scales included.

    Row t of the embedding is what the first layer gets for token t; hidden @ head.T are the logits before any
    soft-cap.
    """
    c = TargetConfig.from_folder(folder)
    hf, body, layers = load(folder, device, dtype, 1, True)
    with one_line(folder, "embed tokens"):
        embedding = embedding_table(hf, body, layers[0], c)
    with one_line(folder, "run the head"):
        scale = head_scale(hf, body, c)
    head_VH = hf.get_output_embeddings().weight
    return embedding, head_VH if scale == 1 else (head_VH.float() * scale).to(dtype)


def embedding_table(hf: nn.Module, body: nn.Module, first: nn.Module, c: TargetConfig) -> Tensor:
    """What the first layer gets for each token, [V, H]: the embedding and what the model makes of it."""
    got = []

    def stop(layer, args, kwargs):
        got.append(args[0] if args else kwargs["hidden_states"])
        raise Reached

    hook = first.register_forward_pre_hook(stop, with_kwargs=True)

    def entering(tokens_DL: Tensor) -> Tensor:
        with contextlib.suppress(Reached):
            body(input_ids=tokens_DL, use_cache=False)
        x = got.pop()
        if x.shape != (*tokens_DL.shape, c.hidden):
            raise Unfit(f"its layers get {list(x.shape)}, not one hidden state a token")
        return x

    every_V = torch.arange(c.vocab, device=hf.device)
    table_VH = torch.cat([entering(part[:, None])[:, 0] for part in every_V.split(4096)])
    pairs = every_V[: 2 * min(64, c.vocab // 2)].view(-1, 2)
    if not torch.allclose(entering(pairs)[:, 1], table_VH[pairs[:, 1]], rtol=1e-2, atol=1e-4):
        raise Unfit("what its first layer gets depends on the position, which a drafter's does not")
    hook.remove()
    plain = hf.get_input_embeddings().weight
    return plain if torch.equal(table_VH, plain) else table_VH.to(plain.dtype)


class Given:
    """Stands for the output of the layers, so that the head alone is run."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, i: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def head_scale(hf: nn.Module, body: nn.Module, c: TargetConfig) -> float:
    """The number s with logits = s * hidden @ head.T, soft-capped as config.json says; Unfit if the head
    does anything else.
    """
    base, head_VH = body if hf.base_model is hf else hf.base_model, hf.get_output_embeddings().weight
    hidden_NH = torch.randn(8, c.hidden, generator=torch.Generator().manual_seed(0)).to(head_VH)
    plain = (hidden_NH @ head_VH.T).float()
    hidden_NH = hidden_NH / plain.abs().max().to(hidden_NH.dtype)
    plain = (hidden_NH @ head_VH.T).float()  # now within 1

    def logits(hidden: Tensor) -> Tensor:
        base.forward = lambda *args, **kwargs: Given(hidden[None])
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        found = hf(input_ids=tokens, use_cache=False).logits[0].float()
        del base.forward
        return found

    little = logits(hidden_NH / 16) * 16
    scale = ((little * plain).sum() / plain.square().sum()).item()
    scale = 1.0 if abs(scale - 1) < 2e-3 else scale
    rough = 1e-3 if head_VH.dtype == torch.float32 else 2e-2
    for size in (1, 8, 64, 1024):
        found, expected = logits(hidden_NH * size), plain * (scale * size)
        if c.softcap:
            expected = c.softcap * torch.tanh(expected / c.softcap)
        if not torch.allclose(found, expected, rtol=rough, atol=rough * expected.abs().max().item()):
            raise Unfit(
                "its logits are more than a scaled, soft-capped product, which no drafter's loss knows"
            )
    if not scale > 0:
        raise Unfit(f"its logits have the scale {scale:g}, not one above 0")
    return scale
