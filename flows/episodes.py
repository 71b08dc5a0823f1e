"""Whether prompts are played over several turns, and how the rollout's key says so."""

from functools import lru_cache

from environments import load_reference, located
from environments.environment import Interactive
from infra.storage.artifacts import ArtifactRef, open_artifact
from tasks.rollout.episodes.config import EpisodesConfig
from tasks.rollout.episodes.play import Episodes


def episodes_of(config: EpisodesConfig, dataset: ArtifactRef, split: str) -> Episodes | None:
    """How the split's prompts are played; None where the environment has one turn."""
    reference = _environment(dataset, split)
    if reference is None or not _is_interactive(reference):
        return None
    return Episodes(config=config, environment=located(reference))


def rollout_settings(settings: str, episodes: Episodes | None) -> str:
    """What a rollout's key names: of one turn as ever, of several the limits too; not how many processes or which
    interpreter play them."""
    if episodes is None:
        return settings
    same = EpisodesConfig()
    shaping = episodes.config.model_copy(
        update={name: getattr(same, name) for name in ("workers", "at_once", "python")}
    )
    return f"{settings}:{shaping.digest()}"


@lru_cache
def _environment(dataset: ArtifactRef, split: str) -> str | None:
    names = open_artifact(dataset).table(split)["environment"]
    return names[0].as_py() if len(names) else None


@lru_cache
def _is_interactive(reference: str) -> bool:
    return isinstance(load_reference(reference), Interactive)
