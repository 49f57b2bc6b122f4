"""Measures the cost of each codec, and the link rate below which it saves time.

    python -m benchmarks.codecs

Times are medians on one thread, in milliseconds per MB of fp32. A codec saves time on a link if sending the
saved bytes would take longer than encoding and decoding.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from collapipe.codec_numbers import CODEC_NAMES
from collapipe.tensors.encoding import LOSSY_CODECS, LossyCodec
from collapipe.weights.delta_codecs import DELTA_CODECS

SHAPE = (8, 128, 768)
"""A micro-batch of 8 samples of 128 tokens with the hidden size of BERT-base: 3.1 MB."""
REPETITIONS = 30


def milliseconds(action: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def main() -> None:
    """Measures every lossy codec of activations and of uploads."""
    torch.set_num_threads(1)
    tensor = torch.randn(SHAPE)
    megabytes = tensor.nbytes / 1e6
    codecs: dict[str, LossyCodec] = {
        CODEC_NAMES[number]: codec for number, codec in LOSSY_CODECS.items()
    }
    codecs.update(DELTA_CODECS)
    for name, codec in codecs.items():
        data = codec.encode(tensor)
        encode = milliseconds(partial(codec.encode, tensor))
        decode = milliseconds(partial(codec.decode, data, SHAPE))
        saved = 8 * (tensor.nbytes - data.nbytes)
        error = (codec.decode(data, SHAPE) - tensor).norm() / tensor.norm()
        print(
            f"{name}: encode {encode / megabytes:.3f} ms/MB, decode {decode / megabytes:.3f} ms/MB, "
            f"size {data.nbytes / tensor.nbytes:.3f}, relative error {error:.1e}, "
            f"saves time below {saved / (encode + decode) / 1e6:.1f} Gbit/s"
        )


if __name__ == "__main__":
    main()
