"""MaxSim as a custom operator, because graphs cannot contain eager's value reads and loops over chunks."""

from ..backend import widest
from ..custom_ops import custom_op
from .eager import maxsim_eager


def _triton():
    from .triton_kernels import maxsim_triton

    return (maxsim_triton,)


def _fake(queries, splits, number, first):
    return queries.new_empty(*queries.shape[:2], splits.shape[1], dtype=widest(queries))


_maxsim = custom_op("maxsim", eager=maxsim_eager, triton=_triton, fake=_fake)
