"""Which operations are right for arguments of any strides.

Some kernels read a tensor as if it were contiguous and give wrong numbers where it is not
(``native_group_norm_backward`` on CPU).  One device's step gave them contiguous arguments; a rank's program has to as
well.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from autopar.passes.rules.pointwise import is_pointwise
from autopar.passes.torch_ops import OpOverload

# Views, products and reductions that go through torch's iterators, and calls whose only business is strides.
ANY_STRIDES = frozenset(
    f"aten::{name}"
    for name in """
    view _unsafe_view reshape permute transpose t unsqueeze squeeze expand slice select split split_with_sizes unbind
    diagonal unfold alias detach clone cat stack flip roll repeat constant_pad_nd
    mm bmm addmm baddbmm mv addmv dot vdot
    sum mean amax amin max min argmax argmin any all prod var std var_mean std_mean cumsum cumprod
    gather index_select index embedding where
    """.split()  # noqa: SIM905 - fifty names read better as text
)


@lru_cache(maxsize=4096)
def takes_any_strides(op: OpOverload) -> bool:
    """Whether ``op`` may be given arguments that are not contiguous where one device's were."""
    if op is torch.ops.aten.view.dtype:  # the same name as the view that changes sizes, and bound to the strides
        return False
    return op._schema.name in ANY_STRIDES or is_pointwise(op)
