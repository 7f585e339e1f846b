"""Which samples a calibration has counted already, so that an interrupted one goes on after the last of them.

After every counted sample the exact statistics of all tensors go into the ``Journal`` of the job, with a digest chained
over the samples. On the next run the same samples are read again but not computed: their digest must be the same, so
that statistics of other data are never mixed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from quark.errors import DataError
from quark.files.journal import Arrays, Journal
from quark.observers import Statistic
from quark.onnx.data import Feed
from quark.onnx.fingerprint import of_arrays

KEY = "statistics of calibration"


class CountedSamples:
    """What is counted of one calibration.

    Args:
        journal: where it is kept; one that nothing outlives makes every method do nothing.
        statistics: tensor name -> a fresh statistic; filled with what is remembered.
    """

    def __init__(self, journal: Journal, statistics: dict[str, Statistic]) -> None:
        self._journal, self._statistics = journal, statistics
        self._digests: list[bytes] = []
        self.samples, self.complete = 0, False
        self._remembered = b""
        arrays = journal.arrays(KEY)
        if arrays is not None:
            self.samples, self.complete = int(arrays["counted"]), bool(arrays["complete"])
            self._remembered = arrays["digest"].tobytes()
            restore(statistics, arrays)

    def __bool__(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._journal)

    def unseen(self, feeds: Iterable[Feed]) -> Iterator[Feed]:
        """The samples that are still to be counted; the others are compared with those that were.

        Raises:
            DataError: other samples were counted, or fewer or more than there are.
        """
        if not self._journal:
            yield from feeds
            return
        known, digest, index = self.samples, b"", -1
        for index, feed in enumerate(feeds):
            digest = of_arrays(feed, digest)
            if index == known - 1 and digest != self._remembered:
                raise DataError(f"SaveAndRestore: the first {known} samples are not those that were counted before")
            if index >= known:
                if self.complete:
                    raise DataError(
                        f"SaveAndRestore: the calibration was over after {known} samples; now there are more"
                    )
                self._digests.append(digest)
                yield feed
        if index + 1 < known:
            raise DataError(f"SaveAndRestore: {known} samples were counted before, and now there are only {index + 1}")

    def count(self, samples: int = 1) -> None:
        """Remember that so many more samples, the next ones in order, are in the statistics."""
        if not self._journal:
            return
        self.samples += samples
        self._remembered = self._digests[samples - 1]
        del self._digests[:samples]
        self._save()

    def close(self) -> None:
        """Remember that there are no more samples."""
        if self._journal and not self.complete:
            self.complete = True
            self._save()

    def _save(self) -> None:
        own = {
            "counted": np.array(self.samples),
            "complete": np.array(self.complete),
            "digest": np.frombuffer(self._remembered, np.uint8),
        }
        self._journal.finish_arrays(KEY, {**own, **state_of(self._statistics)})


def state_of(statistics: Mapping[str, Statistic]) -> Arrays:
    """The states of all statistics, their arrays named ``<number>/<field>``."""
    states: Sequence[Arrays] = [statistic.state() for statistic in statistics.values()]
    return {f"{number}/{field}": array for number, state in enumerate(states) for field, array in state.items()}


def restore(statistics: dict[str, Statistic], arrays: Arrays) -> None:
    """Replace each statistic by the one that ``state_of`` described.

    Raises:
        DataError: another kind of statistic was kept of a tensor.
    """
    states: dict[int, Arrays] = {}
    for label, array in arrays.items():
        number, slash, field = label.partition("/")
        if slash:
            states.setdefault(int(number), {})[field] = array
    for place, (name, fresh) in enumerate(list(statistics.items())):
        if states[place].keys() != fresh.state().keys():
            raise DataError(
                "SaveAndRestore: before, the calibration data told how many samples there are and now it does not, or "
                f"the reverse, so other statistics are kept (tensor {name!r}); give the same kind of reader, or "
                "remove the file and start again"
            )
        statistics[name] = type(fresh).from_state(states[place])
