"""A batch as optimizer steps."""

from collections.abc import Sequence

import numpy as np

from tasks.update.batch import Sample


def optimizer_steps(samples: Sequence[Sample], minibatches: int, epochs: int, seed: int) -> list[list[Sample]]:
    """`minibatches` parts of the batch for each epoch, in turn; of a batch with fewer prompts, as many as it has prompts.

    The samples of a prompt stay together. The order of the prompts is drawn anew for each epoch, from the seed alone; within
    a part samples are in the table's order. A single part is the batch as it is.
    """
    if minibatches == 1:
        return [list(samples)] * epochs
    groups: dict[bytes, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.tobytes(), []).append(sample)
    prompts, steps = list(groups.values()), []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        for part in np.array_split(order, min(minibatches, len(prompts)) or 1):
            chosen = [sample for index in part for sample in prompts[index]]
            steps.append(sorted(chosen, key=lambda sample: sample.row))
    return steps
