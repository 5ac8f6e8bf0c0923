"""Questions about checkpoints: doctor, differences, statistics, the report."""
