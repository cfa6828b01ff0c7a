from kestrel_runtime.output.output_parser import Grammar, GrammarState, TokenRule

FREE, FORCED = TokenRule(), TokenRule(allowed=(3,))
GRAMMAR = Grammar((GrammarState(FREE, 0, (3, 2), 1), GrammarState(FORCED, 2), GrammarState(FREE, 2)))


def test_a_state_is_followed_by_its_successor():
    assert GRAMMAR.after(0, 17, is_exhausted=False) == 0
    assert GRAMMAR.after(1, 3, is_exhausted=False) == 2


def test_one_token_may_lead_elsewhere():
    assert GRAMMAR.after(0, 3, is_exhausted=False) == 2


def test_a_spent_budget_leads_elsewhere_but_that_token_goes_first():
    assert GRAMMAR.after(0, 17, is_exhausted=True) == 1
    assert GRAMMAR.after(0, 3, is_exhausted=True) == 2


def test_a_state_without_an_exit_ignores_the_budget():
    assert GRAMMAR.after(2, 17, is_exhausted=True) == 2


def test_the_rules_are_told_in_order():
    assert GRAMMAR.rules == (FREE, FORCED, FREE)
