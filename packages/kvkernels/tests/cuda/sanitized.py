"""A few batches on the fiber GPU, for a process with sanitizers: `python -m tests.cuda.sanitized`."""

from .cases import Case
from .host_gpu import HostGPU

CASES = (
    Case([1, 17, 40], chunk=32),
    Case([70, 20], [70, 1], cache="int8", has_token_scales=True, group=3),
    Case([40], query="float32", cache="float32", window_left=9),
)


def main() -> None:
    """Run and compare every case."""
    gpu = HostGPU()
    for case in CASES:
        case.check(gpu)
    print("clean")


if __name__ == "__main__":
    main()
