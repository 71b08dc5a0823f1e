"""BeamConfig: what `config.json` of a Beam checkpoint may say, and one clear error for what it may not."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from infra.errors import BadInput

ATTENTION_TYPES = ("full_attention", "sliding_attention")
MLP_TYPES = ("dense", "sparse")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "num_experts",
)


@strict
class BeamConfig(PreTrainedConfig):
    """The architecture of a Beam checkpoint; the defaults are those of Reflection-Beam-1.0.

    After construction `head_dim`, `layer_types` and `mlp_layer_types` are always set, and `rope_parameters` is the one
    flat dictionary that is used, also where the file keyed it by layer type.
    Raises BadInput, naming the key and what would be right, for values that no Beam can have.
    """

    model_type = "beam"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_experts: int = 128
    norm_topk_prob: bool = True
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    final_logit_softcapping: float | None = None
    rope_parameters: dict | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for key in SIZES:
            _require(_is_count(getattr(self, key)), key, getattr(self, key), "a whole number above 0")
        if self.layer_types is None:
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["sparse"] * self.num_hidden_layers
        _check_types("layer_types", self.layer_types, ATTENTION_TYPES, self.num_hidden_layers)
        _check_types("mlp_layer_types", self.mlp_layer_types, MLP_TYPES, self.num_hidden_layers)
        self._check_attention()
        self._check_experts()
        _require(self.hidden_act == "silu", "hidden_act", self.hidden_act, '"silu", the only activation of a Beam')
        _require(not self.tie_word_embeddings, "tie_word_embeddings", True, "false: a Beam's lm_head is its own tensor")
        cap = self.final_logit_softcapping
        _require(cap is None or cap > 0, "final_logit_softcapping", cap, "null or a number above 0")
        legacy = {key: kwargs.pop(key) for key in ("rope_theta", "rope_scaling") if kwargs.get(key) is not None}
        self.rope_parameters = _rope(self.rope_parameters, legacy)
        super().__post_init__(**kwargs)

    def _check_attention(self) -> None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        _require(heads % groups == 0, "num_key_value_heads", groups, f"a divisor of num_attention_heads ({heads})")
        if self.head_dim is None:
            right = f"a multiple of num_attention_heads ({heads}) where head_dim is null"
            _require(self.hidden_size % heads == 0, "hidden_size", self.hidden_size, right)
            self.head_dim = self.hidden_size // heads
        even = _is_count(self.head_dim) and self.head_dim % 2 == 0
        _require(even, "head_dim", self.head_dim, "an even number above 0 (rotary positions turn pairs)")
        window = self.sliding_window
        needed = "sliding_attention" in self.layer_types
        _require(not needed or _is_count(window), "sliding_window", window, "a whole number above 0")

    def _check_experts(self) -> None:
        experts, topk, groups, kept = self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group
        available = experts
        if self.grouped_routing:
            right = f"a divisor of num_experts ({experts}) that leaves two experts a group or more"
            fits = _is_count(groups) and experts % groups == 0 and experts // groups >= 2
            _require(fits, "n_group", groups, right)
            _require(_is_count(kept) and kept <= groups, "topk_group", kept, f"1 to n_group ({groups})")
            available = kept * (experts // groups)
        _require(
            topk <= available, "num_experts_per_tok", topk, f"at most the {available} experts a token may choose from"
        )

    @property
    def grouped_routing(self) -> bool:
        """Whether a token first chooses topk_group of the n_group groups of experts: both must be set."""
        return bool(self.n_group and self.topk_group)

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse a tensor-parallel size that would split a head, a KV head or an MLP unevenly.

        Query heads are divided; KV heads are divided, or each held by an equal number of ranks.
        Raises BadInput naming the size and those that fit.
        """
        if not self._tensor_parallel_fits(size):
            fitting = [n for n in range(1, self.num_attention_heads + 1) if self._tensor_parallel_fits(n)]
            raise BadInput(
                f"tensor parallel size = {size!r}: it must divide num_attention_heads ({self.num_attention_heads}) and the "
                f"MLP widths (intermediate_size {self.intermediate_size}, moe_intermediate_size "
                f"{self.moe_intermediate_size}), and divide num_key_value_heads ({self.num_key_value_heads}) or be a "
                f"multiple of it; {fitting} would fit"
            )

    def _tensor_parallel_fits(self, size: int) -> bool:
        if not _is_count(size):
            return False
        groups = self.num_key_value_heads
        widths = [self.intermediate_size] if "dense" in self.mlp_layer_types else []
        widths += [self.moe_intermediate_size] if "sparse" in self.mlp_layer_types else []
        divides = all(n % size == 0 for n in [self.num_attention_heads, *widths])
        return divides and (groups % size == 0 or size % groups == 0)


def _require(holds: bool, key: str, value: Any, right: str) -> None:
    if not holds:
        raise BadInput(f"{key} = {value!r} in a Beam config: it must be {right}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_types(key: str, types: Any, known: tuple[str, ...], layers: int) -> None:
    _require(isinstance(types, list | tuple), key, types, f"a list of {known[0]!r} and {known[1]!r}")
    unknown = sorted({str(kind) for kind in types if kind not in known})
    if unknown:
        raise BadInput(f"{key} names {', '.join(map(repr, unknown))}: a Beam layer is {known[0]!r} or {known[1]!r}")
    if len(types) != layers:
        raise BadInput(f"{key} has {len(types)} entries: it must have one a layer (num_hidden_layers = {layers})")


def _rope(given: Any, legacy: dict[str, Any]) -> dict[str, Any]:
    """The flat rope parameters out of a flat dictionary, one keyed by layer type, or the pre-v5 keys of transformers."""
    if given is None:
        given = legacy.get("rope_scaling") or {}
    _require(isinstance(given, dict), "rope_parameters", given, 'a dictionary such as {"rope_theta": 10000.0}')
    if given and set(given) <= set(ATTENTION_TYPES):
        used = [entry for entry in given.values() if entry is not None]
        right = f"keyed by layer type with exactly one entry that is not null; {len(used)} are not"
        _require(len(used) == 1, "rope_parameters", given, right)
        given = used[0]
    known = {"rope_type", "type", "rope_theta"}
    _require(
        isinstance(given, dict) and set(given) <= known, "rope_parameters", given, "rope_type and rope_theta, no more"
    )
    kind = given.get("rope_type", given.get("type", "default"))
    _require(kind == "default", "rope_parameters.rope_type", kind, '"default", the only positions of a Beam')
    theta = given.get("rope_theta", legacy.get("rope_theta", 10000.0))
    valid = isinstance(theta, int | float) and not isinstance(theta, bool) and theta > 0
    _require(valid, "rope_parameters.rope_theta", theta, "a number above 0")
    return {"rope_type": "default", "rope_theta": float(theta)}
