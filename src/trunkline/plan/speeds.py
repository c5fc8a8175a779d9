"""A hardware profile as the clock of a rehearsal takes it: the speeds of links and disks of one device."""

from __future__ import annotations

from trunkline.offload.lanes.sim_clock import QueueSpeeds
from trunkline.offload.lanes.simulated import DISK, LINK
from trunkline.plan.hardware import Hardware


def speeds_of(hardware: Hardware | None, devices: int) -> QueueSpeeds:
    """The share of one device in what its node has.

    Args:
        hardware: the machine; None for one on which nothing takes time.
        devices: that work at the same time, over all nodes; those of a node share its uplinks, memory and disks.
    """
    if hardware is None:
        return QueueSpeeds()
    here = min(devices, hardware.devices_per_node)
    disk = hardware.disk
    alone = {DISK["fetch"]: disk.read / here, DISK["stash"]: disk.write / here}
    pairs = {
        DISK["fetch"]: (DISK["stash"], disk.both_read / here),
        DISK["stash"]: (DISK["fetch"], disk.both_write / here),
    }
    link = hardware.link
    if link is not None:
        uplink = min(here, link.devices_per_uplink)
        memory = hardware.host_bandwidth / here
        # Host memory serves both directions of all devices at once.
        both = link.both_to_device + link.both_to_host
        share = min(1.0, memory / both) / uplink
        alone |= {
            LINK["fetch"]: min(link.to_device / uplink, memory),
            LINK["stash"]: min(link.to_host / uplink, memory),
        }
        pairs |= {
            LINK["fetch"]: (LINK["stash"], link.both_to_device * share),
            LINK["stash"]: (LINK["fetch"], link.both_to_host * share),
        }
    lanes = {LINK["fetch"]: "fetch", LINK["stash"]: "stash", DISK["fetch"]: "fetch", DISK["stash"]: "stash"}
    slowdown = {queue: hardware.interference.get(lane, 0.0) for queue, lane in lanes.items() if queue in alone}
    slowdown["comm"] = hardware.interference.get("comm", 0.0)
    return QueueSpeeds(
        alone=alone,
        pairs=pairs,
        slowdown=slowdown,
        host_seconds=hardware.host_seconds,
        synchronous=hardware.device_type == "cpu",
    )
