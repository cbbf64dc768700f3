"""From what was asked for to what is executed: the configuration, the noise it means, the proof, the plan."""
