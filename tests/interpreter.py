"""
Corrections of Triton's interpreter.

- bfloat16 is computed as a GPU does it: rounded to nearest even, and multiplied as numbers.
- A scalar is an array of one element, which newer versions of NumPy do not convert to an index by themselves.
- Scans double their spans, as on a GPU. The interpreter's own scan takes one element after another.
- It is three times as fast: the interpreter replaces the language again at every call of a function, looks for
  overflows without reporting them, and makes the types of tensors anew for every operation.
"""

import numpy as np


def repair() -> None:
    """The interpreter keeps bfloat16 as integers, the bits: it truncates when it converts, and multiplies integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    convert = builder.cast_impl

    def to_float32(x):
        return (x.astype(np.uint32) << 16).view(np.float32)

    def cast_impl(self, source, target):
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return handle(to_float32(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(source.data).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return handle(np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)
        return convert(self, source, target)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (to_float32(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        return handle(np.matmul(a, b, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def scan(self, inputs):
        data, axis, step = [x.handle.data for x in inputs], self.axis, 1
        index = np.arange(data[0].shape[axis]).reshape([-1 if n == axis else 1 for n in range(data[0].ndim)])
        while step < index.size:
            pairs = [*(np.roll(x, step, axis) for x in data), *data]
            pairs = [self.to_tensor(x, like.dtype) for x, like in zip(pairs, (*inputs, *inputs), strict=True)]
            joined = self.combine_fn.fn(*pairs)
            data = [np.where(index < step, x, new.handle.data) for x, new in zip(data, joined, strict=True)]
            step *= 2
        return [self.to_tensor(x, like.dtype) for x, like in zip(data, inputs, strict=True)]

    patched, patch = set(), interpreter._patch_lang
    new_scope = getattr(interpreter, "_LangPatchScope", lambda: None)  # Triton 3.4 replaces the language for good

    def patch_once(function):
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
            tl.tensor.__index__ = lambda self: self.handle.data.item()
        return new_scope()

    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    interpreter.ScanOps.generic_scan = scan
    _keep_types(tl, interpreter)


def _keep_types(tl, interpreter) -> None:
    """Lets equal types share what they are made of, and tensors of a type what follows from it."""
    semantic = type(interpreter.interpreter_semantic)
    make_type, make_tensor, equal = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
    broadcast, promote = semantic.broadcast_impl_value, semantic.computation_type_impl
    numpy_dtype = interpreter._get_np_dtype
    types, promoted, numpy_dtypes = {}, {}, {}

    def make_type_once(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    def make_tensor_of_kept(self, handle, type):
        if "of_tensors" not in type.__dict__:
            make_tensor(self, handle, type)
            type.of_tensors = {name: x for name, x in self.__dict__.items() if name != "handle"}
        self.__dict__.update(type.of_tensors, handle=handle)

    def promote_once(self, *arguments):
        key = tuple(getattr(x, "name", x) for x in arguments)
        if key not in promoted:
            promoted[key] = promote(self, *arguments)
        return promoted[key]

    def numpy_dtype_once(type):
        if type.name not in numpy_dtypes:
            numpy_dtypes[type.name] = numpy_dtype(type)
        return numpy_dtypes[type.name]

    def broadcast_others(self, a, b):
        if a.type.is_block() and b.type.is_block() and a.handle.data.shape == b.handle.data.shape:
            return a, b
        return broadcast(self, a, b)

    tl.block_type.__init__, tl.tensor.__init__ = make_type_once, make_tensor_of_kept
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.broadcast_impl_value, semantic.computation_type_impl = broadcast_others, promote_once
    interpreter._get_np_dtype = numpy_dtype_once
