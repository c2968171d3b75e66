"""How often rollouts end as they should, by simulation."""
