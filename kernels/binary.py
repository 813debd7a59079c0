"""What a compiled kernel is made of, read with the tools that ship inside Triton: registers, spills, instructions."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TENSOR_CORE = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "IMMA")
WIDE_LOAD = re.compile(r"(LDGSTS|LDG|UTMALDG)\b.*\.128|UTMALDG")
GLOBAL_ATOMIC = re.compile(r"(ATOM|ATOMG|RED|REDG)(\.|$)")


@dataclass(frozen=True)
class Binary:
    """Attributes:
    registers: per thread.
    stack: bytes per thread; a kernel without local arrays has some only when registers spill.
    size: bytes of the cubin.
    instructions: counts over the whole kernel, by full mnemonic.
    loop: counts in the main loop, the smallest loop that holds the most multiply instructions; empty without one.
    """

    registers: int
    stack: int
    size: int
    instructions: Counter
    loop: Counter

    @property
    def atomics(self) -> list[str]:
        return sorted(name for name in self.instructions if GLOBAL_ATOMIC.match(name))

    @property
    def tensor_core(self) -> list[str]:
        """Families of tensor-core instructions in the main loop."""
        return sorted({name.split(".")[0] for name in self.loop if name.split(".")[0] in TENSOR_CORE})

    @property
    def wide_loads(self) -> int:
        """128-bit (or bulk tensor) loads from global memory in the main loop."""
        return sum(count for name, count in self.loop.items() if WIDE_LOAD.match(name))

    @property
    def narrow_loads(self) -> int:
        """Narrower loads from global memory in the main loop: block ids, and whatever was not vectorised."""
        families = ("LDG", "LDGSTS")
        return sum(n for name, n in self.loop.items() if name.split(".")[0] in families and not WIDE_LOAD.match(name))


def inspect(cubin: bytes) -> Binary:
    """Disassemble one cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        listing = _run("cuobjdump", "-sass", file.name)
    instructions = parse_listing(listing)
    return Binary(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        size=len(cubin),
        instructions=Counter(name for _, name, _ in instructions),
        loop=main_loop(instructions),
    )


def parse_listing(listing: str) -> list[tuple[int, str, str]]:
    """(address, mnemonic, operands) of each instruction of a `cuobjdump -sass` listing."""
    line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
    return [(int(address, 16), name, operands) for address, name, operands in line.findall(listing)]


def main_loop(instructions: list[tuple[int, str, str]]) -> Counter:
    """Instructions between a backward branch and its target, for the loop with the most multiplies, then the fewest lines; all
    instructions where no loop multiplies, as when its only round has been unrolled.
    """
    best, best_rank = Counter(), (0, 0)
    for address, name, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if name.startswith("BRA") else None
        if target is None or (start := int(target[1], 16)) >= address:
            continue
        body = Counter(name for at, name, _ in instructions if start <= at <= address)
        multiplies = sum(n for name, n in body.items() if name.split(".")[0] in (*TENSOR_CORE, "FFMA", "FFMA2", "FMUL"))
        rank = (multiplies, -sum(body.values()))
        if multiplies and rank > best_rank:
            best, best_rank = body, rank
    return best or Counter(name for _, name, _ in instructions)


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
