"""The scheduler: queues, policy, the next plan, and what a finished step changes."""
