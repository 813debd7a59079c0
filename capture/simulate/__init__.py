"""Policies over worlds that are drawn, recorded or planned, instead of over a machine.

`worlds` draw how many drafts would be accepted, `arrivals` when requests come, `closed` runs a batch of constant size,
`server` a queue in front of one; both report what an engine reports, and regret.
"""
