"""The wires there are, by the name of their configuration."""

from shmap_tp.collectives import AllReduce, SequenceParallel
from shmap_tp.config import Wire
from shmap_tp.ring import Ring

AnyWire = AllReduce | SequenceParallel | Ring
WIRES: dict[Wire, AnyWire] = {Wire.all_reduce: AllReduce(), Wire.sequence: SequenceParallel(), Wire.ring: Ring()}
