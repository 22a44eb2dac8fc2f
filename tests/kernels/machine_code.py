"""Finds code that reads a uniform register which no instruction before it writes: a fault of ptxas.

ptxas 12.8, which Triton 3.6 and 3.7 ship, loses the start of a wgmma descriptor where two products have their operands
at one address in shared memory and in two layouts.  The second product then reads shared memory that is not its own.
"""

import hashlib
import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import triton
from triton.runtime.cache import get_cache_manager

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s+(.*?)\s*;")
UNIFORM = re.compile(r"(\w*\[)?(?:[^\[\],]*\+)?\bUR(\d+)\b")


def disassembled(cubin: bytes, tool: triton.knobs.NvidiaTool, *flags: str) -> str:
    """What a disassembler of NVIDIA prints.  It is kept in Triton's cache, as kernels are: a disassembler takes longer
    than ptxas."""
    key = hashlib.sha256(cubin + repr((tool.path, tool.version, flags)).encode()).hexdigest()
    cache, name = get_cache_manager(key), "machine_code.sass"
    kept = cache.get_file(name)
    if kept is not None:
        return Path(kept).read_text()
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool.path, *flags, file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    cache.put(text, name, binary=False)
    return text


def unwritten_registers(cubin: bytes) -> list[str]:
    """The instructions of a kernel's machine code that read such a register."""
    text = disassembled(cubin, triton.knobs.nvidia.nvdisasm)
    written: set[int] = set()
    found = []
    for name, operands in INSTRUCTION.findall(text):
        is_written = re.match(r"UR(\d+)(?:,|$)", operands)
        if any(register not in written for register in _read(name, operands, is_written is not None)):
            found.append(f"{name} {operands}")
        if is_written is not None:
            first = int(is_written[1])
            written |= {first, first + 1} if re.search(r"\.(64|WIDE)\b", name) else {first}
    return found


def _read(name: str, operands: str, skip_first: bool) -> list[int]:
    """The registers that an instruction reads.  Of a descriptor of a product's two operands, those of the second if the
    first is in registers."""
    registers = []
    for bracket, number in UNIFORM.findall(operands)[skip_first:]:
        first = int(number)
        if bracket == "gdesc[":
            registers += [first + 2, first + 3] if re.match(r"R\d+, R\d+,", operands) else range(first, first + 4)
        else:
            registers += [first, first + 1] if name == "UIADD3.64" or bracket == "desc[" else [first]
    return registers
