"""The host tier: records in slots of one shared memory file, which outlives the engine's process."""
