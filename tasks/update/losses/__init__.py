"""Policy losses, one a file: `update.loss` names one."""
