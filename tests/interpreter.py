"""Changes to Triton's interpreter for the tests: NumPy 2.4 can run it, and it takes less than half of the time.

Triton 3.6 and 3.7.  No result of a kernel changes, but those of FP8, which it rounds towards zero.
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import torch


@cache
def adapt_interpreter() -> None:
    """Change the interpreter of this process, once."""
    _let_loops_end_at_tensors()
    _patch_language_once_a_launch()
    _leave_out_unused_overflow_checks()
    _keep_numpy_dtypes()
    _keep_shapes()
    _leave_alone_what_changes_nothing()
    _round_to_fp8()


def _let_loops_end_at_tensors() -> None:
    """Triton 3.6's interpreter makes a loop's bound an int in a way that NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_language_once_a_launch() -> None:
    """Triton's interpreter replaces the functions of triton.language for a launch, and then again at every call of a
    device function.  The second time changes nothing and takes half of the launch."""
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_lang(fn):
        module = id(fn.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(fn)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = patch_lang


def _leave_out_unused_overflow_checks() -> None:
    """Each sum and product is computed again in 64 bits.  Without the option `debug` nobody reads the result."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def _keep_numpy_dtypes() -> None:
    """The interpreter builds a table of all dtypes at every operation."""
    from triton.runtime import interpreter

    make = interpreter._get_np_dtype
    kept = cache(make)
    # The type of a pointer has no hash.
    interpreter._get_np_dtype = lambda type: make(type) if type.scalar.is_ptr() else kept(type.scalar)


def _keep_shapes() -> None:
    """Every type of a block and every tensor builds its shape from Triton's own tuple and integers.  There are few."""
    from triton.language import core

    make = core.block_type.__init__

    @cache
    def fields_of(element_type, *sizes):
        made = core.block_type.__new__(core.block_type)
        make(made, element_type, list(sizes))
        return {**vars(made), "of_tensors": shape_and_size(*sizes)}

    @cache
    def shape_and_size(*sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_block(self, element_ty, shape):
        sizes = [core._unwrap_if_constexpr(size) for size in shape]
        # The type of a pointer has no hash.
        if element_ty.is_ptr():
            make(self, element_ty, sizes)
            self.of_tensors = shape_and_size(*sizes)
        else:
            self.__dict__.update(fields_of(element_ty, *sizes))

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else shape_and_size()

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _leave_alone_what_changes_nothing() -> None:
    """Most operands need no broadcast, most values are no constexpr, and most calls have no argument to leave out."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    rules, semantic_of = semantic.TritonSemantic, cache(semantic.TritonSemantic)
    broadcast, cast, unwrap = rules.broadcast_impl_value, rules.cast, core._unwrap_if_constexpr
    equal = core.dtype.__eq__
    unwrapped = (int, float, bool, core.tensor, core.dtype, core.block_type)

    def broadcast_impl_value(self, lhs, rhs):
        is_block = lhs.type.is_block()
        if is_block == rhs.type.is_block() and (not is_block or lhs.type.shape.values == rhs.type.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_to(self, input, dst_ty, fp_downcast_rounding=None):
        if fp_downcast_rounding is None and input.type.scalar is dst_ty:
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def is_equal(self, other):
        return self is other or equal(self, other)

    def unwrap_if_constexpr(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in unwrapped else unwrap(value)

    def patch_attr(obj, name, member, builder, scope):
        def with_semantic(*args, member=member, **kwargs):
            kwargs["_semantic"] = semantic_of(builder)
            return member(*args, **kwargs)

        scope.set_attr(obj, name, with_semantic)

    rules.broadcast_impl_value, rules.cast, core.dtype.__eq__ = broadcast_impl_value, cast_to, is_equal
    core._unwrap_if_constexpr = unwrap_if_constexpr
    interpreter._patch_attr = patch_attr


def _round_to_fp8() -> None:
    """The interpreter truncates to E4M3, and NaN becomes a number.  GPUs round to nearest even, past 448 to 448."""
    from triton.language import float8e4nv, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data, from_type, to_type, rounding_mode):
        if float8e4nv in (from_type, to_type) and float32 in (from_type, to_type):
            values = torch.from_numpy(np.ascontiguousarray(data))
            if to_type == float8e4nv:
                return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            return values.view(torch.float8_e4m3fn).float().numpy().view(np.uint32)
        return convert(data, from_type, to_type, rounding_mode)

    interpreter._convert_float = convert_float
