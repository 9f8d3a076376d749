"""Numbers and records in, numbers out: devices, links, collectives, kernels, memory, schedules, the timeline."""
