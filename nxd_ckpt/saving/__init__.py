"""One save on one rank: capture, plan, stage, write."""
