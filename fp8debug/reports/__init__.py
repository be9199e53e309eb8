"""Findings in the forms that other tools and people take: GitHub's log, SARIF, a page of HTML."""
