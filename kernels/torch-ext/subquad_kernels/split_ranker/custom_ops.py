"""
MaxSim as a custom operator. Eager is one too: it reads values and loops over chunks, which does not belong into a
graph.
"""

from ..backend import widest
from ..registration import custom_op
from .eager import maxsim_eager


def _triton(*inputs):
    from .triton_kernels import maxsim_triton

    return maxsim_triton(*inputs)


def _fake(queries, splits, number, first):
    return queries.new_empty(*queries.shape[:2], splits.shape[1], dtype=widest(queries))


_maxsim = custom_op("maxsim", eager=maxsim_eager, triton=_triton, fake=_fake)
