"""A trainer over several processes of this machine: rank 0 is the caller's, the others follow its calls."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from infra.errors import BadInput, Corrupted, NonFiniteUpdate, Transient
from infra.numerics.mxfp8 import Mxfp8Config
from infra.policy.adapters import LoraConfig
from tasks.update.config import UpdateConfig
from tasks.update.model import BACKENDS
from tasks.update.trainer import Trainer

START_METHOD = "spawn"
"""How other processes are started: with nothing of this one, which may have threads."""


def make_trainer(
    model_dir: str,
    config: UpdateConfig,
    seed: int,
    lora: LoraConfig | None = None,
    mxfp8: Mxfp8Config | None = None,
) -> "Trainer | TrainerGroup":
    """A trainer of as many processes as `config.parallel` needs."""
    return (Trainer if config.parallel.processes == 1 else TrainerGroup)(model_dir, config, seed, lora, mxfp8)


class TrainerGroup:
    """A `Trainer` a process, called in step. It looks like one `Trainer`.

    Followers get their own part of a batch and nothing else of it; weights and optimizer states stay where they are
    but for checkpoints. A process that fails or dies ends the group: Transient, `broken`, and a new one has to be made.
    """

    broken = False

    def __init__(
        self,
        model_dir: str,
        config: UpdateConfig,
        seed: int,
        lora: LoraConfig | None = None,
        mxfp8: Mxfp8Config | None = None,
    ):
        """Start the other processes and load the model in all. BadInput as `Trainer`."""
        world = config.parallel.processes
        policy = (model_dir, config, seed, lora, mxfp8)
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        context: Any = torch.multiprocessing.get_context(START_METHOD)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(1, world):
            pipe, theirs = context.Pipe()
            arguments = (theirs, rank, world, store.port, policy)
            process = context.Process(target=_follow, args=arguments, daemon=True, name=f"trainer rank {rank}")
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        try:
            _join(store, 0, world)
            self.trainer = Trainer(*policy)
            self.arithmetic, self.repeatable = self.trainer.arithmetic, self.trainer.repeatable
            self._layers = [self.trainer.forward.replay.layers, *self._replies()]
        except BaseException:
            self.close()
            raise

    def adapter_config(self) -> dict[str, Any] | None:
        """See `Trainer.adapter_config`."""
        return self.trainer.adapter_config()

    def update(self, batch: pa.Table) -> dict[str, float]:
        """See `Trainer.update`."""
        own, *others = self.trainer.parts(batch, self._layers)
        return self._together("update_part", [[part] for part in others], lambda: self.trainer.update_part(own))

    def supervise(self, batches: Sequence[Sequence[tuple[list[int], list[int]]]], lr: float) -> list[float]:
        """See `Trainer.supervise`."""
        return self._same("supervise", batches, lr)

    def token_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """See `Trainer.token_logprobs`."""
        return self._same("token_logprobs", sequences)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer.export`; to be read to its end, as all processes take part in each tensor: else the group ends."""
        self._send("export_nothing", itertools.repeat([]))
        complete = False
        try:
            yield from self.trainer.export()
            complete = True
        finally:
            if not complete:
                self.close()
        self._replies()

    def each[T](self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """`function(trainer, *arguments)` in every process at once, with its own `Trainer`; results by rank.

        A fault of the input or of a store is raised here when all have ended, and the group goes on: such a function must
        not leave the others waiting for its process.
        """
        self._send("each", itertools.repeat([function, *arguments]))
        try:
            own = _outcome(function, self.trainer, *arguments)
        except Exception as error:
            self.close()
            raise Transient(f"trainer over {len(self._pipes) + 1} processes: rank 0 failed: {error}") from error
        outcomes = [own, *self._replies()]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `Trainer.state`; the tensors of other processes have `rank<n>.` in front."""
        self._send("state", itertools.repeat([]))
        tensors, meta = self.trainer.state()
        for rank, theirs in enumerate(self._replies(), 1):
            tensors |= {f"rank{rank}.{name}": torch.from_numpy(array) for name, array in theirs.items()}
        return tensors, meta

    def load_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """See `Trainer.load_state`."""
        parts = [
            [_arrays({n.removeprefix(at): t for n, t in tensors.items() if n.startswith(at)}), meta]
            for at in (f"rank{rank}." for rank in range(1, len(self._pipes) + 1))
        ]
        self._together("load_state", parts, lambda: self.trainer.load_state(tensors, meta))

    def close(self) -> None:
        """End the other processes, and leave the process group."""
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()
        if dist.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def _same(self, name: str, *arguments: Any) -> Any:
        return self._together(name, itertools.repeat(list(arguments)), lambda: getattr(self.trainer, name)(*arguments))

    def _together(self, name: str, arguments: Any, own: Callable[[], Any]) -> Any:
        """Call the method on every rank; all raise the same BadInput or NonFiniteUpdate, or none does."""
        self._send(name, arguments)
        try:
            result = own()
        except (BadInput, NonFiniteUpdate):
            self._replies()
            raise
        except Exception as error:
            self.close()
            raise Transient(f"trainer over {len(self._pipes) + 1} processes: rank 0 failed: {error}") from error
        self._replies()
        return result

    def _send(self, name: str, arguments: Any) -> None:
        for rank, (pipe, theirs) in enumerate(zip(self._pipes, arguments, strict=False), 1):
            try:
                pipe.send((name, theirs))
            except OSError:
                self.close()
                raise Transient(f"trainer over {len(self._pipes) + 1} processes: rank {rank} died") from None

    def _replies(self) -> list[Any]:
        replies = []
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                replies.append(pipe.recv())
            except (EOFError, OSError):
                self.close()
                raise Transient(f"trainer over {len(self._pipes) + 1} processes: rank {rank} died") from None
        return replies


def _outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or the fault of input or store that it meets."""
    try:
        return function(*arguments)
    except (BadInput, Corrupted, Transient, OSError) as fault:
        return fault


def _arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """By value through a pipe: tensors would go by shared memory, of which containers have little."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def _join(store: Any, rank: int, world: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:  # processes share the cores: threads that wait for one another would wait for other processes
        torch.set_num_threads(max(1, torch.get_num_threads() // world))
    backend = BACKENDS if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _follow(pipe: Any, rank: int, world: int, port: int, policy: tuple) -> None:
    """A follower's life: do what rank 0 does. It ends with rank 0, or with its own first unexpected error, which the
    others then see as a lost connection."""
    _join(dist.TCPStore("127.0.0.1", port, world, is_master=False), rank, world)
    trainer: Any = Trainer(*policy)
    pipe.send(trainer.forward.replay.layers)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result: Any = None
            if name == "export_nothing":
                for _ in trainer.export():
                    pass
            elif name == "each":
                result = _outcome(arguments[0], trainer, *arguments[1:])
            elif name == "state":
                result = _arrays(trainer.state()[0])
            elif name == "load_state":
                trainer.load_state({n: torch.from_numpy(array) for n, array in arguments[0].items()}, arguments[1])
            else:
                result = getattr(trainer, name)(*arguments)
        except (BadInput, NonFiniteUpdate):  # rank 0 raises it too
            result = None
        pipe.send(result)
