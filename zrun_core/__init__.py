"""The training runtime: ZeRO stages 0-3 over a user's own module. Import what you need from its modules."""
