"""One model computed by several ranks, each of which has a part of its heads, of its feed-forward layers and of its
vocabulary (tensor parallelism: Shoeybi et al., 1909.08053)."""

from forerun.models.sharded.loading import check_tensor_parallel, load_sharded_model
from forerun.models.sharded.model import ShardedModel

__all__ = ["ShardedModel", "check_tensor_parallel", "load_sharded_model"]
