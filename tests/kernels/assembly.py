"""What the compiled code of a kernel tells: its loops, and what makes it wrong on a GPU."""

import re


def loops(lines: list[str], label: str, jump: str) -> list[list[str]]:
    """The bodies of the loops of an assembly: from a label to a jump back to it."""
    places, found = {}, []
    for n, line in enumerate(lines):
        if match := re.match(label, line):
            places[match[1]] = n
        elif (match := re.search(jump, line)) and match[1] in places:
            found.append(lines[places[match[1]] : n])
    return found


def misread_products(text: str) -> int:
    """
    The number of products in the intermediate code that sm_90 gets wrong. Where the columns of the second operand are
    adjacent in shared memory, a group of warps needs at least as many of them as are swizzled together; otherwise
    Triton's descriptor points outside of the operand. And in half precision each warp that has rows of its own needs
    16 of them.
    """
    layouts = re.findall(r"^(#\S+) = .*nvmma_shared<{swizzlingByteWidth = (\d+), transposed = false", text, re.M)
    groups = re.findall(r"^(#\S+) = .*nvidia_mma<{.*warpsPerCTA = \[(\d+), (\d+)\]", text, re.M)
    swizzled, sizes = dict(layouts), {"f32": 4, "bf16": 2, "f16": 2}
    groups = {name: (int(rows), int(columns)) for name, rows, columns in groups}
    pattern = r"warp_group_dot .* \* !ttg\.memdesc<\d+x(\d+)x(\w+), (#\w+),.*-> tensor<(\d+)x.*, (#\w+)>"
    return sum(
        int(columns) // groups[result][1] * sizes[dtype] < int(swizzled.get(layout, 0))
        or (sizes[dtype] == 2 and int(rows) < 16 * groups[result][0])
        for columns, dtype, layout, rows, result in re.findall(pattern, text)
    )


def unwritten_registers(assembly: str) -> set[str]:
    """
    The uniform registers that the machine code of an NVIDIA GPU reads, but never writes. ptxas 12.8, which Triton 3.6
    brings, put such into the descriptors of products that share the address of an operand.
    """
    read, written = set(), set()
    for operation, arguments in re.findall(r"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?(\S+)(.*);", assembly, re.M):
        result = re.match(r"\s*UR(\d+)\b", arguments)
        if result:
            arguments = arguments[result.end() :]
            size = 4 if ".128" in operation else 2 if re.search(r"\.64|\.WIDE", operation) else 1
            written |= {int(result[1]) + n for n in range(size)}
        # Four registers describe two operands in shared memory; the first two are not read if one is in registers.
        for first, n in re.findall(r"( R\d+,)? gdesc\[UR(\d+)\]", arguments.partition(",")[2]):
            read |= set(range(int(n) + (2 if first else 0), int(n) + 4))
        read |= {int(n) for n in re.findall(r"(?<!gdesc\[)UR(\d+)", arguments)}
    return {f"UR{n}" for n in read - written}
