"""Advantages, one a file: `reward.advantage` names one."""
