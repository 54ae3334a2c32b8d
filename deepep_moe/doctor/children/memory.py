"""Let another process open an anonymous memory file of this one through /proc, as ranks of the backend `shm` do."""

import mmap
import os
import subprocess
import sys

_NUM_BYTES = 1 << 20
_ANSWER = """
import mmap, os, sys
with mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0) as memory:
    memory[:5] = memory[:5][::-1]
"""


def main() -> int:
    fd = os.memfd_create("deepep_moe_doctor", os.MFD_CLOEXEC)
    os.ftruncate(fd, _NUM_BYTES)
    with mmap.mmap(fd, _NUM_BYTES) as memory:
        memory[:5] = b"hello"
        subprocess.run([sys.executable, "-P", "-c", _ANSWER, f"/proc/{os.getpid()}/fd/{fd}"], check=True, timeout=10)
        return 0 if memory[:5] == b"olleh" else 1


if __name__ == "__main__":
    sys.exit(main())
