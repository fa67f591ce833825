"""
Corrections of Triton's interpreter.

- bfloat16 is computed as a GPU does it: rounded to nearest even, and multiplied as numbers.
- Scans double their spans, as on a GPU. The interpreter's own scan takes one element after another.
- It is twice as fast: the interpreter replaces the language again at every call of a function, and looks for
  overflows without reporting them.
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

    patched, patch, restore = set(), interpreter._patch_lang, interpreter._LangPatchScope.restore

    def patch_once(function):
        """Patches a module once in a launch, when the first of its functions is called."""
        if function.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(function.__module__)
        return patch(function)

    def restore_all(self):
        patched.clear()
        restore(self)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch_once, restore_all
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    interpreter.ScanOps.generic_scan = scan
