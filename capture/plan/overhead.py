"""What launching costs: a model of three numbers, all of them assumptions until a GPU measures them."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepgraph.capture.modes import Mode


@dataclass(frozen=True)
class Overhead:
    """Microseconds; the defaults are round figures of the kind that profilers show on recent GPUs, not measurements.

    Attributes:
        node_us: on the device, from the end of one kernel of a step to the start of the next.
        launch_us: on the host, to launch one graph.
        eager_op_us: on the host, to launch one op from Python.
    """

    node_us: float = 1.0
    launch_us: float = 8.0
    eager_op_us: float = 6.0

    def mode_us(self, sums: Mapping[str, float], mode: Mode) -> float:
        """Time of a step in this mode: host and device work overlap, so the slower of the two decides.

        device = roofline time + launches · node_us
        host = graph launches · launch_us + ops outside graphs · eager_op_us
        """
        device_us = sums["time_us"] + sums["launches"] * self.node_us
        host_us = sums[f"graphs/{mode}"] * self.launch_us + sums[f"eager/{mode}"] * self.eager_op_us
        return max(device_us, host_us)
