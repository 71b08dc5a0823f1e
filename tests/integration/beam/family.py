"""Beam, named once for all parity checks."""

from infra.models.beam import checkpoint
from infra.models.beam.register import register
from tests.integration.family import DATA, Family

BEAM = Family(golden=DATA / "beam-golden", register=register, router="BeamRouter", fp32=checkpoint.is_router, window=16)
BEAM.register()
