"""The WKV operator in plain torch: time a call of the time-parallel form and of the plain recurrence, by length."""

import argparse
import statistics
import time

import torch

from subquad_kernels import wkv


def median_milliseconds(function, repeats: int) -> float:
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=8, help="number of heads (default: 8)")
    parser.add_argument("--head-size", type=int, default=64, help="size of a head (default: 64)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 64, 256, 1024, 4096], help="tokens")
    parser.add_argument("--repeats", type=int, default=5, help="calls of which the median is taken (default: 5)")
    parser.add_argument("--quick", action="store_true", help="lengths 1 and 256 only, once")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.lengths, arguments.repeats = [1, 256], 1

    print(
        f"WKV, torch {torch.__version__}, {torch.get_num_threads()} threads, float32, batch 1, "
        f"{arguments.heads} heads of {arguments.head_size}, medians of {arguments.repeats}, ms"
    )
    print(f"{'tokens':>8} {'forward':>10} {'recurrence':>11} {'ratio':>7} {'forward+backward':>17}")
    for length in arguments.lengths:
        generator = torch.Generator().manual_seed(0)
        shape = (1, length, arguments.heads, arguments.head_size)
        r, k, v, log_w = (torch.randn(shape, generator=generator) for _ in range(4))
        inputs = r, k, v, -log_w.exp(), torch.randn(shape[2:], generator=generator)

        def forward(backend, inputs=inputs):
            with torch.no_grad():
                wkv(*inputs, backend=backend)

        def both(inputs=inputs):
            leaves = [x.clone().requires_grad_() for x in inputs]
            wkv(*leaves)[0].sum().backward()

        fast = median_milliseconds(lambda f=forward: f("eager"), arguments.repeats)
        slow = median_milliseconds(lambda f=forward: f("reference"), 1)
        training = median_milliseconds(both, arguments.repeats)
        print(f"{length:>8} {fast:>10.2f} {slow:>11.2f} {slow / fast:>7.1f} {training:>17.2f}")


if __name__ == "__main__":
    main()
