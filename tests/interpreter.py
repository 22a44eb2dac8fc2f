"""Changes to Triton's interpreter for the tests: NumPy 2.4 can run it, and it takes less than half of the time.

Triton 3.6 and 3.7.  No result of a kernel changes, but those of FP8, which it rounds towards zero.
"""

import builtins
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
    """Every tensor builds its shape from Triton's own tuple and integers.  There are few shapes."""
    from triton.language import core

    @cache
    def shape_and_size(*shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_size(*builtins.tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = init


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
