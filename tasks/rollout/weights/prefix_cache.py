"""KV of old weights is never taken for that of new ones: vLLM's prefix cache, when weights change while requests run.

Reaches into vLLM 0.30.0's scheduler: its reset_prefix_cache does nothing while a request holds a block. Seen:
tests/integration/test_sync_engine.py, no request takes over KV of old weights. Can go: when vLLM salts the cache by the
version of the weights.
"""

import uuid
from typing import Any


def forget(scheduler: Any) -> None:
    """Have requests that are admitted from now on find no KV that was computed before; those that run keep theirs.

    vLLM's own reset does nothing while any request holds a block. And what a running request computes from now on is of
    new weights on top of old KV: it goes into the cache under hashes that no other request has.
    """
    for pool in {manager.block_pool for manager in scheduler.kv_cache_manager.coordinator.single_type_managers}:
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    scheduler.reset_connector_cache()
    for request in scheduler.running:
        request.cache_salt = uuid.uuid4().hex
        request.block_hashes.clear()
        request.update_block_hashes()
