"""Changes to Triton's interpreter for the tests: NumPy 2.4 can run it, and it takes a fourth of the time.

Triton 3.6 and 3.7.  No result of a kernel changes, but those of FP8, which it rounds towards zero, and of tl.fma,
which it rounds twice.
"""

import ast
import inspect
import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from tests.replay import Launch, Recorder


@cache
def the_recorder() -> Recorder:
    """Of this process's interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

    def copies(self, handle, sizes):
        data = np.empty(sizes, handle.data.dtype)
        data[...] = handle.data
        return TensorHandle(data, handle.dtype)

    InterpreterBuilder.create_copies = copies
    return Recorder(interpreter_builder, TensorHandle)


@cache
def adapt_interpreter() -> None:
    """Change the interpreter of this process, once."""
    _patch_language_once()
    _leave_out_unused_overflow_checks()
    _multiply_and_add_at_once()
    _keep_numpy_dtypes()
    _keep_shapes()
    _leave_alone_what_changes_nothing()
    _broadcast_once()
    _keep_constants()
    _round_to_fp8()
    _loop_over_tensors()
    _see_values()
    _see_reductions()
    _repeat_programs()


def _patch_language_once() -> None:
    """Triton's interpreter replaces the functions of triton.language for a launch, and then again at every call of a
    device function.  In this process nothing else calls them: they stay replaced."""
    from triton.runtime import interpreter

    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    patched: set[int] = set()

    def patch_lang(fn):
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(fn)
        return nothing

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
    kept: dict[str, Any] = {}

    def np_dtype(type):
        name = type.scalar.name
        if name not in kept:
            kept[name] = make(type)
        return kept[name]

    interpreter._get_np_dtype = np_dtype


def _keep_shapes() -> None:
    """Every type of a block and every tensor builds its shape from Triton's own tuple and integers.  There are few."""
    from triton.language import core

    make, constexpr = core.block_type.__init__, core.constexpr
    kept: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    @cache
    def shape_and_size(*sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_block(self, element_ty, shape):
        sizes = tuple([size.value if type(size) is constexpr else size for size in shape])
        # The type of a pointer has no hash.
        fields = kept.get((element_ty.name, sizes))
        if fields is None:
            make(self, element_ty, list(sizes))
            fields = kept[element_ty.name, sizes] = {**vars(self), "of_tensors": shape_and_size(*sizes)}
        self.__dict__.update(fields)
        self.element_ty = element_ty

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else shape_and_size()

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _leave_alone_what_changes_nothing() -> None:
    """Most values have their type, most values are no constexpr, and most calls have no argument to leave out."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    rules, semantic_of = semantic.TritonSemantic, cache(semantic.TritonSemantic)
    cast, unwrap = rules.cast, core._unwrap_if_constexpr
    equal = core.dtype.__eq__
    unwrapped = (int, float, bool, core.tensor, core.dtype, core.block_type)

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
        # Its wrapper only looks whether there is a semantic.
        if getattr(member, core.TRITON_BUILTIN, False):
            member = getattr(member, "__wrapped__", member)

        def with_semantic(*args, member=member, **kwargs):
            kwargs["_semantic"] = semantic_of(builder)
            return member(*args, **kwargs)

        scope.set_attr(obj, name, with_semantic)

    rules.cast, core.dtype.__eq__ = cast_to, is_equal
    core._unwrap_if_constexpr = unwrap_if_constexpr
    interpreter._patch_attr = patch_attr


def _broadcast_once() -> None:
    """What shape two shapes have together is asked of Triton's rules once; then values are copied by NumPy."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    rules, tensor, block_type = semantic.TritonSemantic, core.tensor, core.block_type
    broadcast = rules.broadcast_impl_value
    recorder = the_recorder()
    # By the shapes' ids: a shape is kept for good.
    kept: dict[tuple[int, int], Any] = {}

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        of_shapes = id(lhs.shape), id(rhs.shape)
        if of_shapes not in kept:
            kept[of_shapes] = recorder.unseen(broadcast, self, lhs, rhs)[0].shape
        shape = kept[of_shapes]
        return of_shape(lhs, shape), of_shape(rhs, shape)

    def of_shape(x, shape):
        if x.shape is shape:
            return x
        sizes = [size.value for size in shape.values]
        return tensor(interpreter.interpreter_builder.create_copies(x.handle, sizes), block_type(x.dtype, sizes))

    rules.broadcast_impl_value = broadcast_impl_value


def _keep_constants() -> None:
    """Two operands of one type keep it, and so do a pointer and its offset.  A number beside a tensor becomes a tensor
    of its type and shape, which is kept: kernels use few numbers, many times.  Its values cannot be written."""
    from triton.language import core, semantic

    rules, tensor, dtype = semantic.TritonSemantic, core.tensor, core.dtype
    check = rules.binary_op_type_checking_impl
    kept: dict[tuple[Any, ...], Any] = {}

    def operands(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        how = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        left_is_tensor, right_is_tensor = type(lhs) is tensor, type(rhs) is tensor
        if left_is_tensor and right_is_tensor:
            left, right = lhs.dtype, rhs.dtype
            stay = left is right and not div_or_mod
            if type(right) is dtype and (stay or (allow_lhs_ptr and left.is_ptr() and right.is_int())):
                return self.broadcast_impl_value(lhs, rhs)
            return check(self, lhs, rhs, *how)
        one, number = (lhs, rhs) if left_is_tensor else (rhs, lhs)
        if left_is_tensor == right_is_tensor or type(one.dtype) is not dtype or type(number) not in (int, float, bool):
            return check(self, lhs, rhs, *how)
        key = (one.dtype.name, one.shape, left_is_tensor, type(number), number, arithmetic_check, div_or_mod)
        if key not in kept:
            left, right = check(self, lhs, rhs, *how)
            unchanged, made = (left, right) if left_is_tensor else (right, left)
            if unchanged is not one:
                return left, right
            made.handle.data.flags.writeable = False
            kept[key] = made
        return (lhs, kept[key]) if left_is_tensor else (kept[key], rhs)

    rules.binary_op_type_checking_impl = operands


def _multiply_and_add_at_once() -> None:
    """As compiled: a product is not rounded before the addition.  float64 holds the products of float32."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(self, x, y, z):
        exact = np.multiply(x.data, y.data, dtype=np.float64) + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = fma


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


def _loop_over_tensors() -> None:
    """As compiled: the variable of a loop between tensors is a tensor, of their type."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic

    def between(*bounds):
        if not any(type(bound) is core.tensor for bound in bounds):
            return range(*map(core._unwrap_if_constexpr, bounds))
        first, end, step = bounds if len(bounds) == 3 else (*bounds, 1) if len(bounds) == 2 else (0, *bounds, 1)
        return steps(semantic.to_tensor(first), semantic.to_tensor(end), step)

    def steps(at, end, step):
        dtype = semantic.integer_promote_impl(at.dtype, end.dtype)
        at, end = semantic.cast(at, dtype), semantic.cast(end, dtype)
        while semantic.less_than(at, end):
            yield at
            at = semantic.add(at, step, True)

    class Loops(interpreter.ASTTransformer):
        def visit_For(self, node):
            call = node.iter
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
                call.func.id = "between"
            return self.generic_visit(node)

    # What Triton's module holds is seen by its rewritten functions.
    interpreter.between = between
    interpreter.FunctionRewriter.ast_transformer = Loops()


def _see_values() -> None:
    """Tell the recorder which values come from elsewhere than operations, and by which a program decides."""
    from triton.runtime import interpreter

    recorder, patch = the_recorder(), interpreter._patch_lang_tensor

    def init(self, data, dtype, attr=None):
        # Triton's checks that NumPy's values are no wider than the type.
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if recorder.is_recording:
            recorder.give_up()

    def all_hold(self):
        # Triton's own code asks a handle only within operations.
        if recorder.is_recording:
            recorder.give_up()
        return bool(self.data.all())

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        # Triton 3.6 makes a loop's bound an int in a way that NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: recorder.decided(self.handle, number))
        scope.set_attr(tensor, "__bool__", lambda self: recorder.decided(self.handle, truth))

    def number(handle):
        return handle.data.item()

    def truth(handle):
        # All scalars are tensors here.
        return bool(handle.data) if handle.data.size == 1 else True

    interpreter.TensorHandle.__init__, interpreter.TensorHandle.__bool__ = init, all_hold
    interpreter._patch_lang_tensor = patch_lang_tensor


def _see_reductions() -> None:
    """Reductions and scans, which are no operations of the interpreter's builder."""
    from triton.language.core import tensor
    from triton.runtime import interpreter

    recorder = the_recorder()

    def recorded(kind):
        apply = kind.apply

        def apply_to(self, input):
            if not recorder.is_recording:
                return apply(self, input)
            given, types = input if isinstance(input, tuple) else (input,), []

            def of_handles(*handles):
                found = apply(self, tuple(tensor(h, x.type) for h, x in zip(handles, given, strict=True)))
                types[:] = [x.type for x in found]
                return tuple(x.handle for x in found)

            handles, step = recorder.step(kind.__name__, of_handles, tuple(x.handle for x in given), False)
            if step is not None and types:
                step.types = types
            results = tuple(map(tensor, handles, types or step.types))
            return results if isinstance(input, tuple) else results[0]

        kind.apply = apply_to

    recorded(interpreter.ReduceOps)
    recorded(interpreter.ScanOps)


def _repeat_programs() -> None:
    """A launch whose programs are recorded and repeated (tests/replay.py)."""
    from triton.runtime import interpreter

    builder, recorder, signature_of = interpreter.interpreter_builder, the_recorder(), cache(inspect.signature)

    def launch(self, *args, **kwargs):
        """As Triton's, on a CPU."""
        signature = signature_of(self.fn)
        given, named = self._init_args_hst(args, {k: v for k, v in kwargs.items() if k in signature.parameters})
        interpreter._patch_lang(self.fn)
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        arguments = {
            name: value if name in self.constexprs else interpreter._implicit_cvt(value)
            for name, value in bound.arguments.items()
        }
        grid = tuple(self.grid(arguments) if callable(self.grid) else self.grid)
        grid += (1,) * (3 - len(grid))
        builder.set_grid_dim(*grid)
        run = self.fn if math.prod(grid) == 1 else Launch(recorder, self.fn).run
        try:
            for index in product(*map(range, grid)):
                builder.set_grid_idx(*index)
                run(**arguments)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch


def run_programs_in_reverse(monkeypatch: Any) -> None:
    """The last program of a launch runs first: a GPU gives no order."""
    from triton.runtime.interpreter import InterpreterBuilder

    set_index = InterpreterBuilder.set_grid_idx

    def set_opposite(self, *index):
        set_index(self, *(size - 1 - at for size, at in zip(self.grid_dim, index, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_opposite)
