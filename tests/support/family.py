"""What every model family must pass, in transformers and in Megatron. A new family only names itself: see `Family`.

A golden folder holds `config.json`, `model.safetensors` with an index, and beside it `golden.safetensors` with input_ids
[B, T] int64, logits [B, T, vocab] fp32 and, for a mixture of experts, routes [B, T, sparse layers, topk] int32 (their
order is free).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from infra.errors import BadInput

DATA = Path(__file__).parent.parent / "data"
LOGITS = 1e-4
"""The greatest difference of an fp32 logit from its golden value."""


@dataclass(frozen=True)
class Family:
    """One family: where its golden files lie, and the few things that the checks cannot find out by themselves."""

    golden: Path
    """Folder with a small checkpoint and its golden values."""
    register: Callable[[], None]
    """Makes the family known to the Auto classes and the bridge."""
    router: str = ""
    """Class name of its router in transformers, whose output's third part is the chosen experts; empty: dense."""
    fp32: Callable[[str], bool] = lambda name: False
    """Whether the checkpoint's tensor of that name is fp32 in a model of any dtype."""
    window: int = 0
    """Tokens that a sliding layer sees; the golden sequences are longer."""

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.golden / "model.safetensors")

    def values(self) -> dict[str, Tensor]:
        return load_file(self.golden / "golden.safetensors")


def hf_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def same_sets(routes: Tensor, others: Tensor) -> bool:
    """Whether each token's experts are the same ones, whatever their order."""
    return torch.equal(routes.long().sort(-1).values, others.long().sort(-1).values)


def copy_checkpoint(family: Family, to: Path, tensors: dict[str, Tensor]) -> Path:
    """A folder with the family's config.json and these tensors."""
    to.mkdir(parents=True, exist_ok=True)
    (to / "config.json").write_text((family.golden / "config.json").read_text())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def in_bf16(family: Family, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint as a bf16 model keeps it: each tensor in bf16 but those that are fp32 in every model."""
    return {name: tensor if family.fp32(name) else tensor.bfloat16() for name, tensor in tensors.items()}


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


class TransformersParity:
    """The transformers implementation of a family: subclass it as `TestX` and set `family`."""

    family: Family

    def test_logits_and_routes_are_the_golden_ones(self) -> None:
        model, golden = hf_model(self.family.golden), self.family.values()
        logits, routes = self.forward(model, golden["input_ids"])
        assert (logits - golden["logits"]).abs().max() < LOGITS
        if self.family.router:
            assert same_sets(routes, golden["routes"])

    def test_prefill_and_decode_with_the_cache_equal_one_full_forward(self) -> None:
        """A prompt shorter than the window, then token by token far beyond it, and a prompt longer than the window."""
        model, golden = hf_model(self.family.golden), self.family.values()
        ids, whole = golden["input_ids"], golden["logits"]
        for prompt in (5, self.family.window + 4):
            with torch.no_grad():
                out = model(ids[:, :prompt], use_cache=True)
                steps = [out.logits]
                for at in range(prompt, ids.shape[1]):
                    out = model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
                    steps.append(out.logits)
            assert (torch.cat(steps, 1) - whole).abs().max() < LOGITS

    def test_generate_is_greedy_decoding_also_with_left_padding(self) -> None:
        model, ids = hf_model(self.family.golden), self.family.values()["input_ids"][:2, :20]
        plain = ids
        for _ in range(12):
            with torch.no_grad():
                logits = model(plain, use_cache=False).logits
            plain = torch.cat([plain, logits[:, -1].argmax(-1, keepdim=True)], 1)
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **settings), plain)
        padded, mask = torch.zeros(2, 27, dtype=torch.long), torch.zeros(2, 27, dtype=torch.long)
        padded[:, 7:], mask[:, 7:] = ids, 1
        assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 7:], plain)

    def test_save_and_load_return_every_tensor_bit_for_bit(self, tmp_path: Path) -> None:
        for dtype, source in ((torch.float32, self.family.tensors()), (torch.bfloat16, self.bf16_tensors())):
            saved = tmp_path / str(dtype)
            hf_model(copy_checkpoint(self.family, tmp_path / f"from {dtype}", source), dtype).save_pretrained(saved)
            assert_same_tensors(load_file(saved / "model.safetensors"), source)

    def test_tensors_that_are_fp32_in_every_model_survive_loading_and_casting(self) -> None:
        source = self.family.tensors()
        kept = {name: tensor for name, tensor in source.items() if self.family.fp32(name)}
        loaded = hf_model(self.family.golden, torch.bfloat16)
        cast = hf_model(self.family.golden).to(torch.bfloat16).bfloat16().half().to("cpu", torch.bfloat16)
        for model in (loaded, cast):
            state = model.state_dict()
            assert_same_tensors({name: state[name] for name in kept}, kept)
            assert {t.dtype for name, t in state.items() if name not in kept} == {torch.bfloat16}

    def test_tensors_missing_extra_or_misshapen_are_named(self, tmp_path: Path) -> None:
        tensors = self.family.tensors()
        tensors.pop("model.layers.1.input_layernorm.weight")
        tensors["model.layers.0.self_attn.bogus.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.ones(7)
        with pytest.raises(BadInput) as error:
            hf_model(copy_checkpoint(self.family, tmp_path, tensors))
        said = str(error.value)
        assert "1 missing: model.layers.1.input_layernorm.weight" in said
        assert "1 not part of a " in said and "model.layers.0.self_attn.bogus.weight" in said
        assert "model.norm.weight is [7] instead of [" in said

    def bf16_tensors(self) -> dict[str, Tensor]:
        return in_bf16(self.family, self.family.tensors())

    def forward(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [B, T, V], routes [B, T, sparse layers, topk]) of a transformers model."""
        seen: list[Tensor] = []
        routers = [module for module in model.modules() if type(module).__name__ == self.family.router]
        hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[2])) for router in routers]
        with torch.no_grad():
            logits = model(ids).logits
        for hook in hooks:
            hook.remove()
        return logits, torch.stack([chosen.view(*ids.shape, -1) for chosen in seen], 2) if seen else torch.empty(0)
