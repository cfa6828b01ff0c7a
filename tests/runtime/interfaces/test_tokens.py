from kestrel_runtime.interfaces.tokens import Token, TokenRule


def test_a_token_is_text_unless_it_carries_a_value():
    assert Token(17).value == ()
    assert Token(5, (0.25,)) != Token(5)
    assert Token(5, (0.25,)) == Token(5, (0.25,))


def test_a_rule_lets_every_token_pass_unless_it_says_otherwise():
    assert TokenRule() == TokenRule(allowed=None, suppressed=(), is_spatial=False)
