"""Settings of the policy update."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from infra.config import LATER, Config
from infra.sources import idea_reference, known_ideas, named
from tasks.update import losses

KlEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


class ParallelConfig(Config):
    """How the trainer is spread over processes (Megatron's process groups)."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel size: each matrix is split over this many devices."""
    pipeline: int = Field(1, ge=1)
    """Pipeline-parallel size: the layers are split into this many stages."""
    virtual: int | None = Field(None, ge=2)
    """Virtual stages of each pipeline stage (interleaved 1F1B, a smaller bubble); null: one. Needs pipeline > 1."""
    data: int = Field(1, ge=1)
    """Data-parallel size: so many copies of the policy, each with its part of a batch; `shard_optimizer` shares the
    optimizer's state among them."""
    expert: int = Field(1, ge=1)
    """Expert-parallel size: the experts of a MoE layer are spread, whole, over this many of a stage's tensor x data devices,
    which it must divide. 1: each expert is split like any other matrix, over the tensor-parallel devices."""
    sequence: bool = False
    """Sequence parallelism: norms and residuals are split along the sequence too. Needs tensor > 1."""

    @property
    def processes(self) -> int:
        """Processes of the trainer, one a device."""
        return self.pipeline * self.tensor * self.data

    @property
    def expert_tensor(self) -> int:
        """Devices that an expert's matrices are split over."""
        return self.tensor if self.expert == 1 else 1

    @model_validator(mode="after")
    def _possible(self) -> "ParallelConfig":
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel.sequence splits over the tensor-parallel group: it needs parallel.tensor > 1")
        if self.virtual and self.pipeline == 1:
            raise ValueError("parallel.virtual splits pipeline stages: it needs parallel.pipeline > 1")
        if self.tensor * self.data % self.expert:
            step = math.lcm(self.tensor, self.expert) // self.tensor
            raise ValueError(
                f"parallel.expert {self.expert} does not divide parallel.tensor x parallel.data = {self.tensor} x "
                f"{self.data}, the devices that experts are spread over; parallel.data {-(-self.data // step) * step} fits"
            )
        return self


class CorrectionConfig(Config):
    """Corrections for the difference between rollout engine and trainer (tasks/update/corrections.py).

    k is a token's probability in the trainer, before the update, over its probability in the rollout.
    """

    tokens: Literal["none", "truncate", "mask"] = "none"
    """none: the clipped importance ratio is taken to the rollout itself. truncate: tokens are weighted by min(k, high)
    (truncated importance sampling); metric truncated_fraction. mask: by k within [low, high] and by 0 outside (IcePop,
    MIS); metric masked_fraction."""
    low: float = Field(0.5, ge=0, le=1)
    """Smallest k that counts, for `mask`."""
    high: float = Field(2.0, ge=1)
    """Largest k that counts (`mask`), or that weights get (`truncate`)."""
    sequences: Literal["none", "mask"] = "none"
    """mask: drop whole responses by the bounds below; metric masked_sequences (their tokens are in masked_fraction). It
    costs one more forward pass."""
    sequence_low: float = Field(0.99, ge=0, le=1)
    """Smallest geometric mean of a response's k that counts."""
    sequence_high: float = Field(1.01, ge=1)
    """Largest geometric mean of a response's k that counts."""
    sequence_veto: float = Field(1e-4, ge=0, le=1)
    """A response with a token of smaller k does not count."""
    max_k3: float | None = Field(None, gt=0)
    """The largest mean k3 (of k - 1 - log k, over a step's tokens) with which a step is taken: above it engine and trainer
    do not hold one policy, and the run ends before it learns from that. null: no limit."""


class UpdateConfig(Config):
    """A policy loss with AdamW, on Megatron-Core."""

    lr: float = Field(1e-5, gt=0)
    """AdamW's learning rate, reached after `lr_warmup_steps`; from there as `lr_schedule` says."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from lr / lr_warmup_steps to lr."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], LATER] = "constant"
    """How the learning rate goes on after its warm-up: over `lr_decay_steps` down to `lr_end` of lr, straight or along half a
    cosine."""
    lr_decay_steps: Annotated[int | None, LATER] = Field(None, ge=1)
    """Steps over which linear and cosine go down; they need it."""
    lr_end: Annotated[float, LATER] = Field(0.0, ge=0, le=1)
    """Share of lr that is left in the end."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, on matrices only (never on norms and biases)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm when theirs is larger."""

    loss: Annotated[str, LATER] = Field("grpo", examples=known_ideas(losses))
    """The policy loss: a name of [tasks/update/losses](algorithms.md#losses), or the path of a file of yours (docs/extending.md)."""
    loss_args: Annotated[dict[str, Any], LATER] = {}
    """The loss's own settings."""
    reduction: Annotated[Literal["token_mean", "sequence_mean", "sequence_sum", "fixed"], LATER] = "token_mean"
    """How a step's tokens become one number. token_mean: all weigh the same. sequence_mean: all responses do. sequence_sum:
    the mean over responses of their tokens' sum. fixed: that, over `reduction_length` (Dr. GRPO)."""
    reduction_length: Annotated[int | None, LATER] = Field(None, ge=1)
    """Tokens that `fixed` divides by, e.g. rollout.max_new_tokens."""
    minibatches: Annotated[int, LATER] = Field(1, ge=1)
    """Optimizer steps that an epoch of the batch is cut into; samples of a prompt stay together, and the order is drawn anew
    for each step and epoch."""
    epochs: Annotated[int, LATER] = Field(1, ge=1)
    """How often a step goes through its batch."""
    old_logprobs: Annotated[Literal["auto", "rollout", "trainer"], LATER] = "auto"
    """Which policy the importance ratio is taken to. rollout: the one that sampled. trainer: the trainer's own before the
    step's first optimizer step (with several, one more forward pass). auto: trainer where `correction` weighs what lies
    between the two, else rollout."""
    clip_eps_low: float = Field(0.2, ge=0, lt=1)
    """The importance ratio is clipped below at 1 - clip_eps_low."""
    clip_eps_high: float = Field(0.2, ge=0)
    """The importance ratio is clipped above at 1 + clip_eps_high (DAPO's "clip higher": larger than the lower one)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference (the initial weights). 0: no reference is kept."""
    kl_estimator: KlEstimator = "k3"
    """Which estimate of KL(policy || reference) a token's penalty is (http://joschu.net/blog/kl-approx.html). k1+ and k3+
    have k2's gradient, which is that of the KL; k1's is zero on average, k3's that of the other direction's KL."""
    entropy_coef: Annotated[float, LATER] = Field(0.0, ge=0)
    """Weight of an entropy bonus."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the rollouts: logits are divided by it, so that logprobs mean what the engine's do."""

    correction: CorrectionConfig = CorrectionConfig()
    """For rollouts in another precision, or by other kernels, than the update."""

    microbatch_tokens: int = Field(1024, ge=1)
    """Tokens computed in one forward and backward pass; the gradient does not depend on it. A single sample
    that is longer gets a microbatch of its own."""
    recompute: bool = False
    """Keep a layer's input only and compute the layer again in the backward pass: less memory, a third more work. The
    gradient is the same."""
    logits_chunk_tokens: int = Field(512, ge=1)
    """Logits exist for this many loss tokens at a time ([chunk, vocabulary] in fp32, twice)."""
    share_prompts: bool = True
    """Compute a prompt once for all its samples in a microbatch (exact). Off: once a sample."""
    skip_zero_advantage: bool = True
    """Skip samples whose advantage is exactly 0 when there is no KL penalty: they have no gradient (exact)."""

    replay: Literal["auto", "rollout", "recorded", "off"] = "auto"
    """Which experts a mixture of experts uses while it trains. rollout: those that the rollout engine used (R3,
    arXiv:2510.11370); a batch without routes is refused. recorded: those of the policy's own forward before the update, in
    all of its microbatches (R2). off: the router's own choice. auto: rollout where the batch has routes, else off."""
    replay_weights: bool = False
    """Replay the experts' weights as well, not only which they are: routers then get no gradient. Needs replay recorded
    (vLLM records no weights)."""
    router_bias_rate: float = Field(0.0, ge=0)
    """How far a step moves the correction bias of an expert towards an even load (balancing without an auxiliary loss,
    arXiv:2408.15664; models whose routers have such a bias). 0: biases stay as they are."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What forward and backward compute in. auto: bfloat16 where the device has units for it (GPU; CPU with
    AVX512-BF16 or AMX), else float32, which is several times faster there."""
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the policy's weights are, in the trainer, every version and every engine alike; what a step adds below their
    spacing is kept in fp32 masters. auto: each tensor as the model folder has it. Routers are never rounded below the
    folder's precision. float32 needs precision float32."""
    shard_optimizer: bool = True
    """Data-parallel processes (`parallel.data`) share the optimizer's state, masters and moments, instead of each keeping all
    of it. The weights are the same bit for bit."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory: 12 bytes a parameter less on the GPU, and a slower step."""
    parallel: ParallelConfig = ParallelConfig()
    """Parallel sizes on a GPU cluster."""

    @field_validator("loss")
    @classmethod
    def _known(cls, loss: str) -> str:
        return named(losses, loss)

    def stored(self) -> dict[str, Any]:
        """See `Config.stored`; a loss of one's own is its content, wherever the file lies."""
        values = super().stored()
        return values | {"loss": idea_reference(self.loss)} if "loss" in values else values

    @model_validator(mode="after")
    def _possible(self) -> "UpdateConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        if self.lr_schedule != "constant" and self.lr_decay_steps is None:
            raise ValueError(f"lr_schedule {self.lr_schedule} needs lr_decay_steps, the steps over which it goes down")
        if self.lr_schedule == "constant" and (self.lr_decay_steps is not None or self.lr_end):
            raise ValueError("lr_decay_steps and lr_end are of lr_schedule linear and cosine, not of constant")
        if (self.reduction == "fixed") != (self.reduction_length is not None):
            raise ValueError(
                "reduction fixed divides by reduction_length, e.g. rollout.max_new_tokens: set both, or neither"
            )
        if self.replay == "recorded" and self.minibatches * self.epochs > 1:
            raise ValueError(
                "replay recorded records routes before each optimizer step: with minibatches or epochs above 1 they would not "
                "be those of the first; use replay rollout or off"
            )
        if self.old_logprobs == "rollout" and self.correction.tokens != "none":
            raise ValueError(
                f"correction.tokens {self.correction.tokens} weighs what lies between rollout and trainer, and old_logprobs "
                "rollout would count it twice: leave old_logprobs at auto"
            )
        if self.replay_weights and self.replay != "recorded":
            raise ValueError(f"replay_weights needs replay recorded, not {self.replay}: rollouts carry no weights")
        if self.weights == "float32" and self.precision == "bfloat16":
            raise ValueError(
                "weights float32 with precision bfloat16 would serve other weights than the trainer computes with: "
                "leave weights at auto or bfloat16"
            )
        return self


class WarmStartConfig(Config):
    """Supervised steps on the environment's own solutions of the train prompts, before the first version."""

    steps: int = Field(0, ge=0)
    """Steps; 0: none."""
    samples_per_step: int = Field(64, ge=1)
    """Solutions of a step."""
    lr: float = Field(1e-3, gt=0)
    """AdamW's learning rate; its other settings are `update`'s."""
