"""The sequences of tokens that a stage has under way in a generation."""

from collapipe.errors import WrongStateError
from collapipe.models import GenerationSettings, KeyValues, TokenChooser
from collapipe.tensors import Frame


class TokenSequence:
    """What a stage keeps of one sequence between its passes."""

    def __init__(self, settings: GenerationSettings) -> None:
        self.earlier = KeyValues()
        self.chooser = TokenChooser(settings)
        self.num_passes = 0
        self.num_tokens = 0
        """Tokens of all passes."""


class Sequences:
    """All sequences of one generation. At most `limit` of them are in memory."""

    def __init__(self, limit: int, settings: GenerationSettings) -> None:
        self._limit = limit
        self._settings = settings
        self._under_way: dict[int, TokenSequence] = {}

    def of_pass(self, frame: Frame) -> TokenSequence:
        """Returns the sequence of a pass. Pass 0 begins a new one in place of the earlier one.

        Raises:
            WrongStateError: The pass does not follow the last one, or there would be too many sequences.
        """
        number = frame.micro_batch
        if frame.step_index == 0 and number < self._limit:
            self._under_way[number] = TokenSequence(self._settings)
        sequence = self._under_way.get(number)
        if sequence is None or sequence.num_passes != frame.step_index:
            expected = sequence.num_passes if sequence is not None else 0
            raise WrongStateError(
                f"pass {frame.step_index} of sequence {number} arrived, but pass {expected} comes next, and only "
                f"sequences 0 to {self._limit - 1} are under way"
            )
        sequence.num_passes += 1
        return sequence
