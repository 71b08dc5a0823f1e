"""Beam, named once for all parity checks."""

import functools

from infra.models.beam import checkpoint
from infra.models.beam.register import register
from tests.support.family import DATA, Family

BEAM = Family(
    golden=DATA / "beam-golden",
    register=functools.partial(register, megatron=True),
    router="BeamRouter",
    fp32=checkpoint.is_router,
    window=16,
)
register()
