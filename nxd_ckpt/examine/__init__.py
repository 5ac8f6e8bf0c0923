"""Questions about checkpoints: doctor, differences, statistics, the report, the resume probe."""
